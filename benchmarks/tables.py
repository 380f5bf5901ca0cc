"""Helpers for tables of trainings: resumable runs of the command line, curves, mean and deviation."""

import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vlightning.commands.compare.training import last_checkpoint

Curve = dict[int, dict[str, float]]
CLI = ["-m", "vlightning.cli"]


def read_curve(folder: Path, needed: str) -> Curve:
    """Return the metrics by epoch, over all parts of a resumed run; later parts override earlier ones.

    Args:
        folder: folder of the run.
        needed: name of the metric that an epoch must have.
    """
    curve: Curve = {}
    for file in sorted(folder.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with file.open(newline="") as lines:
            for line in csv.DictReader(lines):
                if not line.get("epoch"):  # learning rates are on separate lines
                    continue
                values = {name: float(value) for name, value in line.items() if value and name != "epoch"}
                curve.setdefault(int(line["epoch"]), {}).update(values)
    return {epoch: values for epoch, values in sorted(curve.items()) if needed in values}


def fit(
    folder: Path,
    words: Sequence[str],
    epochs: int,
    monitor: str,
    threads: int,
    program: Sequence[str] = CLI,
    every: int = 1,
) -> Curve:
    """Train or resume a run unless it is complete, and return the metrics by epoch.

    Args:
        folder: folder of the run.
        words: arguments of `vlightning fit`.
        epochs: number of epochs.
        monitor: name of the metric.
        threads: number of threads of the run.
        program: what Python runs, the command line by default.
        every: number of epochs between two validations.
    """
    curve = read_curve(folder, monitor)
    if len(curve) >= epochs // every:
        return curve
    command = ["fit", *words, f"--trainer.max_epochs={epochs}", "--trainer.logger=CSVLogger"]
    command += [f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=", "--trainer.enable_progress_bar=false"]
    command += [f"--checkpoint.monitor={monitor}", f"--trainer.check_val_every_n_epoch={every}"]
    if checkpoint := last_checkpoint(folder):
        command.append(f"--ckpt_path={checkpoint}")
    run(command, folder / "output.txt", threads, program)
    return read_curve(folder, monitor)


def evaluate(folder: Path, words: Sequence[str], threads: int, program: Sequence[str] = CLI) -> dict[str, float]:
    """Test the last checkpoint of a run unless that is done, and return the results.

    Args:
        folder: folder of the run.
        words: arguments of `vlightning test`.
        threads: number of threads of the run.
        program: what Python runs, the command line by default.
    """
    results = folder / "test.json"
    if not results.is_file():
        command = ["test", f"--ckpt_path={last_checkpoint(folder)}", "--trainer.logger=CSVLogger", *words]
        command += [f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=test"]
        run([*command, "--trainer.enable_progress_bar=false"], folder / "output.txt", threads, program)
        newest = max(folder.glob("test/version_*/metrics.json"), key=lambda path: path.stat().st_mtime)
        results.write_text(json.dumps(json.loads(newest.read_text())["metrics"]))
    found: dict[str, float] = json.loads(results.read_text())
    return found


def run(words: Sequence[str], output: Path, threads: int, program: Sequence[str] = CLI) -> None:
    """Run a command of the command line, and append its output and its peak resident memory to a file.

    Args:
        words: the command and its arguments.
        output: the file.
        threads: number of threads of the run.
        program: what Python runs, the command line by default.

    Raises:
        SystemExit: If the command fails.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with output.open("a") as file:
        command = [sys.executable, *program, *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        file.write(f"Peak memory: {usage.ru_maxrss // 1024} MiB\n")
        if process.returncode:
            raise SystemExit(f"A run failed: see {output}")


def spread(values: Sequence[float]) -> str:
    """Format the mean and the standard deviation of values."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):6.2f} ± {deviation:4.2f}"
