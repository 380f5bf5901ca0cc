"""Output of a run in a terminal of 80 columns and in a file."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.runs.command_line import run
from support.runs.forked import Forked, run_script

TINY_CLI = str(Path(__file__).resolve().parents[2] / "support" / "runs" / "tiny_cli.py")
CONFIG = """\
model: {class_path: ReportingModel}
data: {class_path: TinyData, init_args: {batch_size: 4, rows: 64}}
trainer: {max_epochs: 3, accelerator: cpu, enable_model_summary: false}
"""
NOISE = ("weights_only", "dirpath has changed", "hp_metric", "DataLoader 0", "79.4596328")


def in_terminal(*words: str, folder: Path, columns: int) -> str:
    """Run the command line in a terminal of that width and return what it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = Forked([TINY_CLI, *words], cwd=folder, env={**env, "TERM": "xterm"}, terminal=theirs)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    assert process.wait(timeout=120) == 0, written.decode()
    return written.decode()


def test_a_run_in_a_terminal_of_80_columns_keeps_each_bar_on_one_line(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    shown = in_terminal("fit", "--config", "run.yaml", folder=tmp_path, columns=80)
    assert not [noise for noise in NOISE if noise in shown]
    # To draw again, the lines drawn before are erased: one of the epoch, at most one of the validation.
    erased = [len(found) for found in re.findall(r"(?:\x1b\[1A\x1b\[2K)+", shown)]
    assert erased
    assert max(erased) <= 2 * len("\x1b[1A\x1b[2K")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    bars = [line for line in re.split(r"[\r\n]+|`Trainer", plain) if line.startswith("Epoch 2/2")]
    assert max(map(len, bars)) <= 80
    assert re.search(r"Epoch 2/2 +━+ 16/16 \d:\d\d:\d\d • \d:\d\d:\d\d loss: \S+ +recall_mean: 79\.46", bars[-1])


def test_a_run_without_a_terminal_leaves_no_noise_in_its_log(tmp_path: Path):
    """Two runs, of which the second resumes from the first's checkpoint in another folder."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    stop = (
        "--trainer.callbacks=support.methods.tiny.Sender",
        "--trainer.callbacks.name=SIGTERM",
        "--trainer.callbacks.step=20",
    )
    log = ""
    for words in (stop, ("--ckpt_path", "runs/run/version_0/checkpoints/last.ckpt")):
        done = run_script([TINY_CLI, "fit", "--config", "run.yaml", *words], cwd=tmp_path, merged=True)
        log += done.stdout
    assert done.returncode == 0, log
    assert (tmp_path / "runs/run/version_1/checkpoints/last.ckpt").is_file(), log
    assert not [noise for noise in NOISE if noise in log], log
    assert "\x1b" not in log
    lines = [line for line in log.splitlines() if line.startswith("Epoch")]
    first, resumed, last = lines
    assert re.fullmatch(r"Epoch 0/2, step 1/48, loss \S+", first)
    assert resumed.startswith("Epoch 1/2, step 22/48, loss ")
    assert re.fullmatch(r"Epoch 2/2, step 48/48, loss \S+, val/recall_mean 79.46, \S+ samples/s, 0:00:00 left", last)
    for folder in ("version_0", "version_1"):
        events = EventAccumulator(str(tmp_path / "runs/run" / folder))
        events.Reload()
        assert {"train/loss", "train/samples_per_second"} <= {*events.Tags()["scalars"]}
        assert "hp_metric" not in events.Tags()["scalars"]


def test_the_numbers_of_a_test_are_readable_and_in_their_order(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    ran = run("test", "--config", "run.yaml", "--trainer.enable_progress_bar=false", "--trainer.logger=false")
    assert ran.status == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("test/")]
    assert rows == [
        ["test/text_to_image_median_rank", "12345"],
        ["test/text_to_image_r1", "79.46"],
        ["test/text_to_image_r5", "0.6667"],
        ["test/text_to_image_r10", "90"],
    ]
    assert re.search("^metric +value$", ran.out, re.MULTILINE)  # chance levels are unknown
    assert not list(tmp_path.rglob("metrics.json"))  # no logger, no file
    assert not [noise for noise in NOISE if noise in ran.out + ran.err]
    silent = run("test", "--config", "run.yaml", "--verbose=false", "--trainer.logger=false")
    assert "test/" not in silent.out
    assert run("test", "--config", "run.yaml", "--verbose=false").status == 0
    (file,) = tmp_path.rglob("metrics.json")
    found = json.loads(file.read_text())
    assert found["metrics"]["test/text_to_image_median_rank"] == 12345
    assert (found["stage"], found["checkpoint"], found["step"]) == ("test", None, None)


def test_hp_metric_is_written_where_it_was_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    ran = run("fit", "--config", "run.yaml", "--trainer.max_epochs=1", "--trainer.logger.default_hp_metric=true")
    assert ran.status == 0, ran.err
    events = EventAccumulator("runs/run/version_0")
    events.Reload()
    assert "hp_metric" in events.Tags()["scalars"]
