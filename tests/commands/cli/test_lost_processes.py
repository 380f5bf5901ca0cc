"""A run that loses a loader worker or another process ends soon with one sentence and leaves no process behind.

The processes of the second part are started by the command line itself, as on a cluster.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from support.data.images import draw_image, encoded
from support.methods.reinforced import write_tar
from support.runs.command_line import run
from support.runs.fork_server import ONE_THREAD
from support.runs.forked import run_script
from vlightning.commands.cli import lost_processes
from vlightning.commands.cli.lost_processes import lost_process, lost_worker

TESTS = Path(__file__).resolve().parents[2]
CONFIGS = TESTS.parent / "configs"

# Loader workers


@pytest.fixture(autouse=True)
def no_workers_left(started):
    """A worker whose sibling was killed may wait for it until the program ends; it outlasts torch's one SIGTERM."""
    yield
    for worker in started.children():
        worker.kill()
        worker.join()


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for shard in range(2):
        samples = {
            f"{number:04}": {"png": encoded(draw_image(number, (16, 16))), "txt": f"image {number}".encode()}
            for number in range(40 * shard, 40 * shard + 40)
        }
        write_tar(tmp_path / f"data/{shard}.tar", samples)
    return str(tmp_path / "data/*.tar")


def cases():
    for way in ("map-style", "streamed"):
        for stage, hook, batch in (
            ("fit", "train", 5),
            ("fit", "validation", 1),
            ("validate", "validation", 1),
            ("test", "test", 1),
            ("predict", "predict", 1),
        ):
            fault = f"loader worker killed in {hook if hook != 'train' else 'training'}, {way}"
            marker = pytest.mark.fault(fault, "SIGKILL to one worker", "one sentence within seconds, status 1")
            yield pytest.param(way, stage, f"on_{hook}_batch_start", batch, marks=marker, id=f"{way}-{stage}-{hook}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("way", "stage", "hook", "batch"), list(cases()))
def test_a_killed_loader_worker_ends_the_run_with_one_sentence(tmp_path, monkeypatch, shards, way, stage, hook, batch):
    monkeypatch.chdir(tmp_path)
    streaming = ("--data.streaming=true", "--data.samples_per_epoch=80") if way == "streamed" else ()
    split = {"fit": "validation", "validate": "validation"}.get(stage, stage)
    saves = hook == "on_train_batch_start"
    began = time.monotonic()
    ran = run(
        stage,
        "--model=support.methods.tiny.ImageModel",
        "--data=ImageTextDataModule",
        *(f"--data.{name}={shards}" for name in {"train", split}),
        *streaming,
        "--data.image_size=16",
        "--data.batch_size=4",
        "--data.num_workers=2",
        "--data.vocab_size=200",
        f"--data.cache_dir={tmp_path / 'cache'}",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.num_sanity_val_steps=0",
        *(("--trainer.max_epochs=1",) if stage == "fit" else ()),
        *(("--last_checkpoint.every_n_train_steps=2",) if saves else ()),
        "--trainer.callbacks+=support.methods.tiny.WorkerKiller",
        f"--trainer.callbacks.hook={hook}",
        f"--trainer.callbacks.batch={batch}",
    )
    assert time.monotonic() - began < 60
    assert ran.status == 1
    checkpoint = "runs/vlightning/version_0/checkpoints/last.ckpt"
    assert Path(checkpoint).is_file() == saves
    end = f"; go on with --ckpt_path {checkpoint}" if saves else "; no checkpoint had been written."
    assert re.fullmatch(
        r"(The loader worker with pid \d+ was killed by a signal \(Killed\)|"
        r"(The loader worker with pid \d+|A loader worker) ended unexpectedly), most often because "
        r"memory ran out: lower data.num_workers, or give the job more memory"
        rf"{re.escape(end if stage == 'fit' else '.')} \(--debug shows the traceback\)",
        ran.sentence,
    )


# Processes of one training


def quickstart(folder, strategy, name, rank, *words):
    """A training of two processes, of which one sends itself a signal before its fifth step."""
    done = run_script(  # until the last process that could write is gone, so this waits for all of them
        [
            *("-m", "vlightning.cli", "fit"),
            *(f"--config={CONFIGS / config}" for config in ("albef/quickstart.yaml", f"strategy/{strategy}.yaml")),
            "--trainer.devices=2",
            "--trainer.enable_progress_bar=false",
            "--trainer.num_sanity_val_steps=0",
            "--last_checkpoint.every_n_train_steps=2",
            *(f"--data.{option}" for option in ("length=64", "eval_length=8", "batch_size=4", "num_workers=0")),
            "--trainer.callbacks+=support.methods.tiny.Sender",
            *(f"--trainer.callbacks.{option}" for option in (f"name={name}", "step=4", f"rank={rank}")),
            *words,
        ],
        cwd=folder,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        timeout=240,
    )
    assert "Traceback" not in done.stderr, done.stderr
    sentences = re.findall(r"^vlightning: error: (.*)$", done.stderr, re.MULTILINE)
    assert len(sentences) == 1, done.stderr
    checkpoint = "runs/albef_quickstart/version_0/checkpoints/last.ckpt"
    assert (folder / checkpoint).exists()
    sentence, found, _ = sentences[0].partition(f"; go on with --ckpt_path {checkpoint} (--debug shows the traceback)")
    assert found, sentences
    return done.returncode, sentence


KILLED = "one sentence from the other at once, no process left"
HANGS = "one sentence from the other after the time limit, no process left"


def by_strategy(first):
    """Each fault is tested with one strategy by default, with both under `--all-faults`."""
    other = "fsdp" if first == "ddp" else "ddp"
    return pytest.mark.parametrize("strategy", [first, pytest.param(other, marks=pytest.mark.all_faults)])


@pytest.mark.slow
@by_strategy("ddp")
@pytest.mark.fault("second of two processes killed in mid-epoch", "SIGKILL before a step", KILLED)
def test_a_killed_process_ends_the_first(tmp_path, strategy):
    status, sentence = quickstart(tmp_path, strategy, "SIGKILL", 1)
    assert status == 1
    assert sentence == (
        "The process of rank 1 was killed by SIGKILL, most often because memory ran out, and the others cannot go on "
        "without it: give the job more memory, or lower data.num_workers"
    )


@pytest.mark.slow
@by_strategy("fsdp")
@pytest.mark.fault("first of two processes killed in mid-epoch", "SIGKILL before a step", KILLED)
def test_a_killed_first_process_ends_the_other(tmp_path, strategy):
    status, sentence = quickstart(tmp_path, strategy, "SIGKILL", 0)
    assert status == -signal.SIGKILL
    assert sentence == (
        "Lost the connection to another of the 2 processes of this run, which has died: look at its last output, "
        "and at its memory"
    )


@pytest.mark.slow
@by_strategy("fsdp")
@pytest.mark.fault("second of two processes hangs in mid-epoch", "SIGSTOP before a step", HANGS)
def test_a_process_that_hangs_ends_the_first_within_the_time_limit(tmp_path, strategy):
    status, sentence = quickstart(tmp_path, strategy, "SIGSTOP", 1, "--trainer.strategy.timeout=0:00:15")
    assert status == 1
    assert sentence.startswith("No answer from another of the 2 processes of this run, which hangs, ")


@pytest.mark.parametrize(
    ("error", "beginning"),
    [
        (dist.DistBackendError("NCCL error: ncclRemoteError: a remote process exiting prematurely"), "Lost the conn"),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), "Lost the connection"),
        (dist.DistStoreError("wait timeout after 30000ms, keys: /default_pg/0//cpu//0/1"), "No answer from"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer [10.0.0.1]:2"), "Lost the conn"),
        (RuntimeError("Timed out waiting 30000ms for send operation to complete"), None),
        (dist.DistNetworkError("The server socket has failed to listen: EADDRINUSE"), None),
        (ValueError("gloo: Connection closed by peer"), None),
    ],
)
def test_errors_of_torch_about_lost_processes_are_recognized(error, beginning):
    found = lost_process(error, 4, {1: None})
    assert found is None if beginning is None else found.startswith(beginning)
    after = OSError("could not be written")
    after.__context__ = error
    assert lost_process(after, 4, {1: None}) == found
    if found:
        assert lost_process(error, 4, {1: None, 2: 1}).startswith("The process of rank 2 ended with status 1, and the")


def test_full_shared_memory_has_its_own_message():
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ...")
    assert lost_worker(error).startswith("The loader worker with pid 7 found no room in shared memory (/dev/shm)")
    assert lost_worker(ConnectionResetError("by someone else")) is None


WATCH = """
import subprocess, sys
from vlightning.commands.cli import lost_processes
lost_processes.BEFORE_THE_END = 0.5
launcher = lost_processes.SubprocessScriptLauncher(None, 3, 1)
watched = lost_processes.WatchedLauncher(launcher, lost_processes._report_end)
watched.procs = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sh", "-c", sys.argv[1]])]
if len(sys.argv) > 2:
    watched.ended.set()
watched.watch()
watched.procs[0].kill()
"""


def watched(folder, *words):
    """Wait for all processes that may still write."""
    (folder / "watch.py").write_text(WATCH)
    done = run_script([folder / "watch.py", *words], timeout=60)
    return done.returncode, done.stderr


def test_a_training_that_does_not_notice_a_death_is_ended_with_all_its_processes(tmp_path):
    assert watched(tmp_path, "kill -KILL $$") == (
        1,
        "vlightning: error: The process of rank 2 was killed by SIGKILL, most often because memory ran out, and the "
        "others did not end by themselves within 0.5 seconds, so they are killed: give the job more memory, or lower "
        "data.num_workers.\n",
    )
    assert watched(tmp_path, "kill -KILL $$", "this process is about to end by itself") == (0, "")


def test_processes_that_do_not_end_by_themselves_are_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_processes, "BEFORE_A_KILL", 0.5)
    watched = lost_processes.WatchedLauncher(
        lost_processes.SubprocessScriptLauncher(None, 3, 1), lambda rank, status: None
    )
    watched.procs = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sh", "-c", "exit 3"])]
    watched.procs[0].send_signal(signal.SIGSTOP)
    assert watched.end() == {1: None, 2: 3}
    assert watched.procs[0].wait(10) == -signal.SIGKILL
