"""Time from the kill of a run to the end of its next step, for one and for two processes, in parts.

    python benchmarks/restart.py
    python benchmarks/restart.py --config configs/mmlg/quickstart.yaml --repeats 5

A run of the command line writes a checkpoint after two steps, and SIGKILL ends it after a third. The same command with
the checkpoint is then started at once, and the parts of its start are timed until its first step is done. The median
over the repeats is printed. Each process computes in one thread. Two processes (DDP over gloo) are started by
Lightning's launcher, so the second one's imports come after the first one's.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLOCK = "VLIGHTNING_RESTART_CLOCK"
"""Environment variable: the file to which the first process appends the times of its marks."""
PARTS = {
    "interpreter": "the interpreter starts",
    "imports": "torch, Lightning and this package are imported",
    "construction": "the command line is parsed, module, data and Trainer are built",
    "data": "processes have met, and the data is opened",
    "restore": "initial weights, optimizer, checkpoint",
    "loader": "loader workers, and the first batch",
    "step": "the first step",
}
FIRST, CHECKPOINT = 3, 2  # steps before the kill, and before the checkpoint


def mark(part: str) -> None:
    """Note that a part is done."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with Path(os.environ[CLOCK]).open("a") as file:
            file.write(json.dumps([part, time.time()]) + "\n")


def run(words: list[str]) -> None:
    """Run the command line in this process, with marks."""
    mark("interpreter")
    from lightning.pytorch import Callback

    from vlightning import callbacks
    from vlightning.commands.cli.lightning_cli import VLightningCLI, open_cli

    callbacks.load_all()
    mark("imports")

    class Marks(Callback):
        """Marks in the hooks of a fit."""

        def __init__(self) -> None:
            self.steps = 0

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """The datamodule is set up before."""
            mark("data")

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """The checkpoint is restored."""
            mark("restore")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            """The first batch is there."""
            if not self.steps:
                mark("loader")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """A step is done."""
            self.steps += 1
            mark("step")

    class Timed(VLightningCLI):
        """The command line with marks."""

        def before_fit(self) -> None:
            """Module, data and Trainer are built."""
            mark("construction")
            self.trainer.callbacks.insert(0, Marks())  # type: ignore[attr-defined]

    open_cli(words, Timed)


def start(words: list[str], folder: Path, clock: Path) -> subprocess.Popen[bytes]:
    """Start a run in a process group of its own."""
    variables = os.environ | {CLOCK: str(clock), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--run", *words]
    return subprocess.Popen(
        command, cwd=folder, env=variables, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def marks(process: subprocess.Popen[bytes], clock: Path, steps: int) -> list[tuple[str, float]]:
    """Wait for some steps of a run, kill it, and return its marks.

    Raises:
        RuntimeError: If the run ends before.
    """
    while True:
        found = [tuple(json.loads(line)) for line in clock.read_text().splitlines()] if clock.exists() else []
        if sum(part == "step" for part, _ in found) >= steps:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return found
        if process.poll() is not None:
            raise RuntimeError(process.communicate()[1].decode()[-2000:])
        time.sleep(0.01)


def restart(config: Path, processes: int, folder: Path) -> dict[str, float]:
    """Kill a run and start it again; return the seconds of each part."""
    words = [f"--config={config}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    words += ["--trainer.num_sanity_val_steps=0"]
    if processes > 1:
        words += [f"--config={ROOT / 'configs/strategy/ddp.yaml'}", f"--trainer.devices={processes}"]
    saving = [f"--last_checkpoint.every_n_train_steps={CHECKPOINT}", "--checkpoint.save_top_k=0"]
    marks(start(["fit", *words, *saving], folder, folder / "first"), folder / "first", FIRST)
    (checkpoint,) = folder.glob("runs/*/*/checkpoints/last.ckpt")
    killed = time.time()
    found = marks(start(["fit", *words, f"--ckpt_path={checkpoint}"], folder, folder / "second"), folder / "second", 1)
    parts, before = {}, killed
    for part, now in found:
        parts.setdefault(part, now - before)
        before = now
    return parts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/albef/quickstart.yaml")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    columns = {}
    for processes in args.processes:
        rounds = []
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(restart(args.config.resolve(), processes, Path(folder)))
        columns[processes] = {part: statistics.median(each[part] for each in rounds) for part in PARTS}
    print("| part | content |", " | ".join(f"{processes} process(es), s" for processes in columns), "|")
    print("|---|---|", "---|" * len(columns), sep="")
    for part, content in PARTS.items():
        print(f"| {part} | {content} |", " | ".join(f"{column[part]:.1f}" for column in columns.values()), "|")
    print("| all | |", " | ".join(f"{sum(column.values()):.1f}" for column in columns.values()), "|")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])  # Lightning's launcher starts the second process with all words
    else:
        main()
