"""`vlightning compare`: what it trains, what it writes, and how it goes on."""

import contextlib
import csv
import io
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.runs.command_line import CONFIG, run, tiny_config
from vlightning.cli import main
from vlightning.commands.compare import training
from vlightning.commands.compare.report import difference, interval, spread

SLOW = CONFIG.replace("{dim: 5}", "{dim: 5, learning_rate: 0.0001}")


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The commands of the runs, which run in this process: the tiny module is known here only."""
    commands = []

    def run_here(words, output, environment, processes):
        commands.append(list(words))
        with output.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                main(list(words))
            except SystemExit as stop:
                return int(stop.code)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "run_command", run_here)
    tiny_config(tmp_path, "fast.yaml")
    tiny_config(tmp_path, "slow.yaml", SLOW)
    return commands


def rows():
    with Path("comparison/runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_variants_are_trained_with_each_seed_and_compared_seed_by_seed(started):
    done = run("compare", "slow.yaml", "fast.yaml", "--seeds", "2", "--", "--trainer.max_epochs=2")
    assert done.status == 0, done.err
    assert len(started) == 4
    assert all("--trainer.max_epochs=2" in command for command in started)
    found = {(row["variant"], int(row["seed"])): row for row in rows()}
    assert set(found) == {("slow", 0), ("slow", 1), ("fast", 0), ("fast", 1)}
    for row in found.values():
        (metrics,) = Path(row["folder"]).glob("version_*/metrics.csv")
        with metrics.open(newline="") as file:
            values = [float(line["val/recall_mean"]) for line in csv.DictReader(file) if line["val/recall_mean"]]
        assert float(row["last"]) == values[-1]
        assert float(row["best"]) == max(values)
        assert row["metric"] == "val/recall_mean"  # that of the best checkpoint
        content = torch.load(training.last_checkpoint(Path(row["folder"])), weights_only=False)
        assert int(row["steps"]) == content["global_step"]
    last = {name: float(row["last"]) for name, row in found.items()}
    differences = [last["fast", seed] - last["slow", seed] for seed in (0, 1)]
    assert [float(found["fast", seed]["less_baseline"]) for seed in (0, 1)] == pytest.approx(differences)
    assert {float(found["slow", seed]["less_baseline"]) for seed in (0, 1)} == {0.0}
    half = 12.706 * statistics.stdev(differences) / 2**0.5  # of one degree of freedom
    mean = statistics.mean(differences)
    (line,) = (line for line in Path("comparison/table.md").read_text().splitlines() if line.startswith("| fast"))
    assert line.split("|")[4].strip() == f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
    assert line in done.out
    assert Path("comparison/curves.png").read_bytes().startswith(b"\x89PNG")
    again = run("compare", "slow.yaml", "fast.yaml", "--seeds", "2", "--", "--trainer.max_epochs=2")
    assert len(started) == 4
    assert Path("comparison/table.md").read_text() in again.out


def test_a_stopped_run_goes_on_and_a_failed_one_is_named(started, monkeypatch):
    command = ("compare", "fast.yaml", "--seeds", "1", "--", "--trainer.max_epochs=3")
    whole = run(*command)
    assert whole.status == 0, whole.err
    (expected,) = rows()
    stopped = tuple(word.replace("3", "1") for word in command)
    other = run(*stopped)
    assert "choose another --output" in other.sentence
    assert "--trainer.max_epochs=3" in other.sentence
    # A run that ended after one epoch, before it could be marked as finished.
    run(*stopped[:4], "--output", "stopped", *stopped[4:])
    (folder,) = Path("stopped").glob("*/seed0")
    (folder / "done.json").unlink()
    arguments = folder / "arguments.json"
    arguments.write_text(arguments.read_text().replace("max_epochs=1", "max_epochs=3"))
    done = run(*command[:4], "--output", "stopped", *command[4:])
    assert done.status == 0, done.err
    assert any(word.startswith("--ckpt_path=") for word in started[-1])
    with Path("stopped/runs.csv").open(newline="") as file:
        (resumed,) = csv.DictReader(file)
    assert {name: resumed[name] for name in ("last", "best", "steps")} == {
        name: expected[name] for name in ("last", "best", "steps")
    }
    failed = run("compare", "fast.yaml", "--output", "failed", "--", "--model.dimm=3")
    assert "ended with status 2" in failed.sentence
    assert "dimm" in failed.sentence
    assert run("compare", "fast.yaml", "--output", "failed", "--seeds", "1", "--", "--model.dim=3").status == 0


def test_a_stopped_run_ends_the_comparison_which_starts_no_other(started, monkeypatch):
    def stopped_by(words, output, environment, processes):
        started.append(list(words))
        output.parent.mkdir(parents=True, exist_ok=True)
        return 130

    with monkeypatch.context() as patched:
        patched.setattr(training, "run_command", stopped_by)
        done = run("compare", "slow.yaml", "fast.yaml", "--seeds", "2", "--", "--trainer.max_epochs=1")
    assert done.status == 1
    assert done.err.strip() == "Stopped: the same command goes on."
    assert "Stopping: runs in progress write their checkpoints first." in done.out
    assert len(started) == 1
    assert not Path("comparison/table.md").exists()
    assert run("compare", "slow.yaml", "fast.yaml", "--seeds", "2", "--", "--trainer.max_epochs=1").status == 0


def test_what_the_runs_warned_of_is_shown_once(started, monkeypatch):
    in_this_process = training.run_command

    def warning(words, output, environment, processes):
        status = in_this_process(words, output, environment, processes)
        with output.open("a") as file:
            file.write("vlightning: warning: All labels are equal.\n")
        return status

    monkeypatch.setattr(training, "run_command", warning)
    done = run("compare", "slow.yaml", "fast.yaml", "--seeds", "2")
    first = Path(rows()[0]["folder"]).relative_to("comparison")
    assert done.err.splitlines() == [f"vlightning: warning: {first}: All labels are equal."]


def test_the_best_value_of_a_sweep_is_trained_with_all_seeds(started):
    sweep = ("--sweep", "model.learning_rate=0.0001,0.05", "--sweep", "model.dim=2,3")
    done = run("compare", "bent=fast.yaml", "--seeds", "2", *sweep)
    assert done.status == 0, done.err
    found = rows()
    searched = [row for row in found if row["seed"] == "0"]
    assert len(searched) == 4
    best = max(searched, key=lambda row: float(row["last"]))
    (other,) = (row for row in found if row["seed"] == "1")
    names = ("model.learning_rate", "model.dim")
    assert [other[name] for name in names] == [best[name] for name in names]
    assert f"learning_rate {best['model.learning_rate']}, dim {best['model.dim']}" in done.out
    config = next(Path(other["folder"]).glob("version_*/config.yaml")).read_text()
    assert f"learning_rate: {best['model.learning_rate']}" in config


def test_a_search_by_optuna_resumes_with_the_same_trials(started):
    command = ("compare", "fast.yaml", "--seeds", "1", "--sweep", "model.learning_rate=1e-4..1e-1", "--trials")
    assert run(*command, "2").status == 0
    first = {row["model.learning_rate"] for row in rows()}
    assert len(first) == 2
    assert all(1e-4 <= float(value) <= 1e-1 for value in first)
    assert run(*command, "3").status == 0
    assert len(started) == 3
    assert first < {row["model.learning_rate"] for row in rows()}


def test_the_test_split_is_what_tested_runs_are_compared_by(started):
    done = run("compare", "slow.yaml", "fast.yaml", "--seeds", "1", "--test")
    assert done.status == 0, done.err
    assert [command[0] for command in started] == ["fit", "test"] * 2
    for row in rows():
        (file,) = Path(row["folder"]).glob("version_*_test_*/metrics.json")
        assert float(row["test"]) == json.loads(file.read_text())["metrics"]["test/recall_mean"]
    slow, fast = (float(row["test"]) for row in rows())
    assert f"{fast - slow:+.2f}" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fst.yaml"], "Expected a config file, got 'fst.yaml', which does not exist"),
        (["fast.yaml", "fast.yaml"], "Expected variants of different names, got 'fast' twice"),
        (["fast.yaml", "--baseline", "slow"], "Expected one of fast as --baseline, got 'slow'"),
        (["fast.yaml", "--sweep", "model.dim"], "Expected --sweep OPTION=VALUE,VALUE"),
        (["fast.yaml", "--sweep", "model.dim=1..3"], "Expected --trials with the range of model.dim"),
        (["fast.yaml", "--sweep", "model.dim=3..1", "--trials", "2"], "Expected 0 < LOW < HIGH"),
        (["fast.yaml", "--sweep", "model.dim=a..b", "--trials", "2"], "Expected two numbers"),
        (["fast.yaml", "--trials", "2"], "Expected --sweep with --trials"),
        (["fast.yaml", "--metric", "val/nothing", "--seeds", "1"], "Expected the metric val/nothing"),
    ],
)
def test_a_mistake_is_one_sentence(started, words, sentence):
    assert run("compare", *words).sentence.startswith(sentence)


def test_an_interval_is_that_of_students_t():
    from scipy.stats import t

    values = [1.0, 2.0, 4.0, 3.0]
    expected = t.ppf(0.975, 3) * statistics.stdev(values) / 2
    assert interval(values) == pytest.approx(expected, rel=3e-4)
    assert difference([1.0]) == "+1.00"
    assert spread([1.0, None, 3.0]) == "2.00 ± 1.41"


@pytest.mark.slow
def test_sigterm_to_the_comparison_ends_its_run_with_a_checkpoint(tmp_path):
    words = ["configs/cocord/quickstart_teacher.yaml", "--seeds", "1", "--threads", "1", "--output", "here", "--"]
    command = [sys.executable, "-m", "vlightning.cli", "compare", *words, "--trainer.accelerator=cpu"]
    comparison = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("here/*/seed0/version_0/metrics.csv")):  # of the first epoch
        assert comparison.poll() is None
        time.sleep(0.2)
    comparison.terminate()
    _, errors = comparison.communicate(timeout=120)
    assert comparison.returncode == 1
    assert "Stopped: the same command goes on." in errors
    (folder,) = tmp_path.glob("here/*/seed0")
    assert training.last_checkpoint(folder) is not None
    assert "SIGTERM" in (folder / "output.txt").read_text()


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--seeds", "1", "--threads", "1", "--output", "here", "--"]
    small = ["--data.length=64", "--data.eval_batch_size=32", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        callback = "--trainer.callbacks+=EmbeddingProjector"
        main(["compare", "configs/cocord/quickstart_teacher.yaml", *words, *small, callback])
    assert "val/top1" in out.getvalue()
    (folder,) = Path("here").glob("*/seed0")
    assert "Run folder" in (folder / "output.txt").read_text()
    warning = "EmbeddingProjector draws nothing: the run has no TensorBoardLogger"
    assert f"vlightning: warning: {folder.relative_to('here')}: {warning}" in err.getvalue()
    assert "rank_zero_warn(" not in (folder / "output.txt").read_text()
