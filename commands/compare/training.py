"""One training of a comparison, in a process of its own: it resumes, and what it reached is kept."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...common.errors import UserError
from ...common.files import replacing
from .settings import Run

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""Status of a run that a signal stopped, after its checkpoint or while it started."""
DONE = "done.json"
"""File of a finished run in its folder."""
OUTPUT = "output.txt"
"""File of what a run printed, in its folder."""


@dataclass(frozen=True)
class Metric:
    """The metric that runs are compared by.

    Args:
        name: its name in the validation, such as `val/top1`.
        higher_is_better: whether higher values are better.
    """

    name: str
    higher_is_better: bool

    def best(self, values: Sequence[float]) -> float:
        """Return the best of values."""
        return max(values) if self.higher_is_better else min(values)

    def score(self, value: float) -> float:
        """Return a number that is higher for better values."""
        return value if self.higher_is_better else -value


@dataclass(frozen=True)
class Outcome:
    """What a finished run reached.

    Args:
        run: the run.
        folder: its folder.
        metric: the metric.
        curve: step and value of each validation.
        test: metrics of the test split; empty without a test.
        seconds: wall time of the training, over all its parts.
        warnings: what the run warned of, each once.
    """

    run: Run
    folder: Path
    metric: Metric
    curve: list[tuple[int, float]]
    test: dict[str, float]
    seconds: float
    warnings: list[str]

    @property
    def last(self) -> float:
        """Value of the last validation."""
        return self.curve[-1][1]

    @property
    def best(self) -> float:
        """Best value of all validations, which is selected on the data that it is measured on."""
        return self.metric.best([value for _, value in self.curve])

    @property
    def tested(self) -> float | None:
        """Value of the metric on the test split, if there was a test."""
        return self.test.get("test/" + self.metric.name.partition("/")[2])


@dataclass(frozen=True)
class Trainer:
    """Trains the runs of a comparison.

    Args:
        output: folder of the comparison.
        shared: arguments of `fit` for every run.
        tests: whether the last checkpoint is evaluated on the test split.
        threads: threads of each run; None leaves the environment as it is.
        metric: name of the metric; None for that by which a run selects its best checkpoint.
        mode: `max` or `min`; None for that of the run.
        processes: the processes of the runs in progress.
    """

    output: Path
    shared: Sequence[str]
    tests: bool
    threads: int | None
    metric: str | None
    mode: str | None
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def stop(self) -> None:
        """Let the runs in progress write a checkpoint and end."""
        for process in list(self.processes):
            process.terminate()

    def train(self, run: Run) -> Outcome:
        """Train a run to its end, go on with one that was stopped, or read what a finished one reached.

        Raises:
            UserError: If the folder holds a run with other arguments, a run fails, or it has no such metric.
            KeyboardInterrupt: If the run is stopped, by Ctrl-C or by a signal to its process alone.
        """
        folder = self.output / run.folder_name
        words = run.arguments(self.shared)
        self._check_arguments(folder, words)
        marker = folder / DONE
        if not marker.is_file():
            self._finish(folder, words)
        done: dict[str, Any] = json.loads(marker.read_text())
        metric = self._metric(folder)
        curve = read_curve(folder, metric.name)
        if not curve:
            raise UserError(
                f"Expected the metric {metric.name} in the validations of {folder}, got none of that name: name "
                "another with --metric."
            )
        return Outcome(run, folder, metric, curve, done["test"], done["seconds"], read_warnings(folder / OUTPUT))

    def _check_arguments(self, folder: Path, words: list[str]) -> None:
        file = folder / "arguments.json"
        if file.is_file() and json.loads(file.read_text()) != words and last_checkpoint(folder) is None:
            shutil.rmtree(folder)  # a run that failed before it had trained anything, whose mistake is mended now
        if not file.is_file():
            with replacing(file) as staged:
                staged.write_text(json.dumps(words, indent=1))
        elif (before := json.loads(file.read_text())) != words:
            raise UserError(
                f"Expected the arguments of the run in {folder}, {' '.join(before)}, got {' '.join(words)}: choose "
                "another --output, or remove that folder."
            )

    def _finish(self, folder: Path, words: list[str]) -> None:
        logger = [f"--trainer.logger.save_dir={folder.resolve()}", "--trainer.logger.name="]
        command = ["fit", *words, "--trainer.logger=CSVLogger", *logger, "--trainer.enable_progress_bar=false"]
        if checkpoint := last_checkpoint(folder):
            command.append(f"--ckpt_path={checkpoint}")
        start = time.monotonic()
        clock = folder / "seconds.json"
        before = json.loads(clock.read_text()) if clock.is_file() else 0.0
        try:
            self._call(folder, command)
        finally:
            seconds = before + time.monotonic() - start
            clock.write_text(json.dumps(seconds))
        test: dict[str, float] = {}
        if self.tests:
            # The config names the classes too, which a checkpoint may not where they are a user's own.
            command = ["test", f"--config={_config(folder)}", f"--ckpt_path={last_checkpoint(folder)}"]
            self._call(folder, [*command, "--trainer.enable_progress_bar=false"])
            newest = max(folder.glob("version_*_test_*/metrics.json"), key=lambda path: path.stat().st_mtime)
            test = json.loads(newest.read_text())["metrics"]
        with replacing(folder / DONE) as staged:
            staged.write_text(json.dumps({"seconds": seconds, "test": test}))

    def _call(self, folder: Path, words: Sequence[str]) -> None:
        environment = dict(os.environ)
        if self.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        output = folder / OUTPUT
        if (status := run_command(words, output, environment, self.processes)) in _STOPPED:
            raise KeyboardInterrupt
        if status:
            (last, *_) = reversed(output.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() or [""])
            raise UserError(f"The run in {folder} ended with status {status}, see {output}: {last}")

    def _metric(self, folder: Path) -> Metric:
        """Return the metric of a run, by default that of its checkpoints.

        Raises:
            UserError: If the run selects no best checkpoint, and none is given.
        """
        checkpoint = yaml.safe_load(_config(folder).read_text()).get("checkpoint") or {}
        name = self.metric or checkpoint.get("monitor")
        if name is None:
            raise UserError(f"Expected --metric, since the run in {folder} selects no best checkpoint: name one.")
        same = name == checkpoint.get("monitor")
        mode = self.mode or (checkpoint.get("mode") if same else None) or "max"
        return Metric(name, mode == "max")


def run_command(
    words: Sequence[str], output: Path, environment: Mapping[str, str], processes: set[subprocess.Popen[bytes]]
) -> int:
    """Run a command of the command line in a process of its own; return its status.

    Args:
        words: the command and its arguments.
        output: file that its output is appended to.
        environment: its environment variables.
        processes: the processes in progress, of which it is one until it ends.
    """
    program = [sys.executable, "-m", "vlightning.cli", *words]
    with output.open("ab") as file:
        process = subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT, env=environment)
    processes.add(process)
    try:
        return process.wait()
    finally:
        processes.discard(process)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest last checkpoint of a run; None if there is none."""
    checkpoints = folder.glob("version_*/checkpoints/last.ckpt")
    return max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)


def _config(folder: Path) -> Path:
    """Return the config of the newest part of a run."""
    return max(folder.glob("version_*/config.yaml"), key=lambda path: path.stat().st_mtime)


def read_curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return steps and value of each validation, over all parts of a resumed run; later parts replace earlier ones.

    Lightning counts the step of a log from 0: a validation after 31 steps has the number 30.
    """
    values: dict[int, float] = {}
    for file in sorted(folder.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with file.open(newline="", encoding="utf-8") as lines:
            for line in csv.DictReader(lines):
                if line.get(metric):
                    values[int(line["step"]) + 1] = float(line[metric])
    return sorted(values.items())


def read_warnings(output: Path) -> list[str]:
    """Return the warnings in the output of a run, each once."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    mark = "vlightning: warning: "
    return list(dict.fromkeys(line.removeprefix(mark) for line in lines if line.startswith(mark)))
