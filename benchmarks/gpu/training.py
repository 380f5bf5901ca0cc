"""Quickstarts of three methods from the command line: wall-clock and result."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setting import Setting

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "albef/quickstart": "val/recall_mean",
    "mobileclip/quickstart": "val/recall_mean",
    "cocord/quickstart_teacher": "val/top1",
}

TOY = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
TOY += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2"]


def main() -> None:
    """Write the table."""
    setting = Setting.parsed(__doc__)
    table = setting.table(("run", "seconds, start of Python included", "result"))
    for name, metric in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "vlightning.cli", "fit", "--config", str(ROOT / f"configs/{name}.yaml")]
            command += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"]
            command += ["--trainer.enable_progress_bar=false"]
            command += TOY if setting.pretend else ["--trainer.accelerator=cuda"]
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            seconds = time.perf_counter() - start
            table.row(name, seconds, result(Path(folder), metric) if not done.returncode else done.stderr[-200:])


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
