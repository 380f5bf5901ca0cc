"""Small trainings of three methods in Python, and the quickstarts from the command line: wall-clock and result."""

import dataclasses
import inspect
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer, seed_everything
from setting import Setting, Table, has

from vlightning import datamodules, lightning_modules
from vlightning.callbacks import SkipNonFiniteSteps

ROOT = Path(__file__).resolve().parents[2]
IN_PYTHON = {
    "albef/quickstart": "val/recall_mean",
    "cocord/quickstart_teacher": "val/top1",
    "mobileclip/quickstart": "val/recall_mean",
}
QUICKSTARTS = IN_PYTHON | {
    "cocord/quickstart": "val/top1",
    "mmlg/quickstart": "val/karpathy5/recall_mean",
    "shre/quickstart_teacher": "val/top1",
    "shre/quickstart": "val/h2/recall_mean",
}
SHORT = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 2}
"""Of a Trainer, at toy size."""
FEW = {"length": 256, "eval_length": 64}
"""Of the drawn shapes, at toy size."""


def main() -> None:
    """Write the table."""
    setting = Setting.parsed(__doc__)
    table = setting.table(("run", "way", "seconds", "result"))
    with tempfile.TemporaryDirectory() as folder:
        for name, metric in IN_PYTHON.items():
            if setting.chooses(name):
                measure = partial(in_python, setting, table, name, metric, Path(folder))
                setting.measured("python", 60.0, measure, table, f"{name}, in Python")
        if not has("jsonargparse"):
            table.row("quickstarts", "command line", "left out: jsonargparse is missing")
            return
        for name, metric in QUICKSTARTS.items():
            if setting.chooses(name):
                measure = partial(quickstart, setting, table, name, metric, Path(folder))
                setting.measured("quickstart", 60.0, measure, table, f"{name}, command line")


def in_python(setting: Setting, table: Table, name: str, metric: str, folder: Path) -> None:
    """Train a config's module on its data without the command line, in half precision."""
    config = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    seed_everything(config["seed_everything"])
    data = config["data"]["init_args"]
    data |= FEW if setting.pretend else {"num_workers": max(1, min(12, (os.cpu_count() or 2) - 2))}
    start = time.perf_counter()
    rows: Any = getattr(datamodules, config["data"]["class_path"])(**_in(folder, data))
    kind: Any = getattr(lightning_modules, config["model"]["class_path"])
    module = kind(**_linked(kind, config["model"]["init_args"], rows))
    options: Any = {"max_epochs": config["trainer"]["max_epochs"]} | (SHORT if setting.pretend else {})
    trainer = Trainer(
        accelerator="cpu" if setting.pretend else "cuda",
        devices=1,
        precision="bf16-mixed",
        callbacks=[SkipNonFiniteSteps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, datamodule=rows)
    found = trainer.callback_metrics[metric]
    table.row(name, "Python, bf16", time.perf_counter() - start, f"{metric} {float(found):.2f}")


def _linked(kind: Any, arguments: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Return a module's arguments with the sizes of the data, which the command line sets."""
    parameters = inspect.signature(kind).parameters
    settings = {name: own.default for name, own in parameters.items() if dataclasses.is_dataclass(own.default)}
    groups = {name: {field.name for field in dataclasses.fields(own)} for name, own in settings.items()}
    for size in ("image_size", "vocab_size", "max_tokens"):
        if (value := rows.hparams.get(size)) is None:
            continue
        if size in parameters:
            arguments[size] = value
        for group, fields in groups.items():
            if size not in parameters and size in fields:
                arguments[group] = arguments.get(group, {}) | {size: value}
    return arguments


def _in(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose folders of results are below a folder."""
    return {
        name: str(folder / value) if isinstance(value, str) and value.startswith("runs/") else value
        for name, value in options.items()
    }


def quickstart(setting: Setting, table: Table, name: str, metric: str, folder: Path) -> None:
    """Run a quickstart as its first line says, start of Python included."""
    command = [sys.executable, "-m", "vlightning.cli", "fit", "--config", str(ROOT / f"configs/{name}.yaml")]
    command += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs"]
    command += [f"--trainer.logger.name={name.replace('/', '_')}", "--trainer.enable_progress_bar=false"]
    command += [f"--trainer.accelerator={'cpu' if setting.pretend else 'cuda'}"]
    if setting.pretend:
        command += [f"--trainer.{option}={value}" for option, value in SHORT.items()]
        command += [f"--data.{option}={value}" for option, value in FEW.items()]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=max(1.0, setting.left()))
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode)
    table.row(name, "command line", seconds, result(folder / "runs" / name.replace("/", "_"), metric))


def result(folder: Path, metric: str) -> str:
    """Return the last value of a metric in a run's CSV file, and its name."""
    for file in folder.rglob("metrics.csv"):
        names, *rows = (line.split(",") for line in file.read_text().splitlines())
        if metric in names:
            values = [row[names.index(metric)] for row in rows if row[names.index(metric)]]
            return f"{metric} {float(values[-1]):.2f}"
    return f"no {metric}"


if __name__ == "__main__":
    main()
