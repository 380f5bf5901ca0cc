"""Extraction of MM-LG against plain training of the CLIP that it computes, with the same teacher; storage; expansion.

    python benchmarks/mmlg_step.py                 # all three
    python benchmarks/mmlg_step.py --only step     # one of: step, memory, expansion

**step** and **memory**: forward of the teacher (ViT-B/16 with QuickGELU, random weights, with the attention that
teachers have here), forward, backward and optimizer of a ViT-S/16 CLIP of 12 layers a tower, on a batch in memory.
"open_clip" is open_clip's CLIP, "plain" the same with this package's attention, "TLEG" the baseline method. Times are
medians of interleaved calls; memory is the peak of three steps over the baseline memory, each in a new process.

**expansion**: number of values in the learngene's file and in three plain models of 12, 8 and 6 layers, and the seconds
for building and initializing a model of each depth from the file.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import torch
from timing import PRECISIONS, autocast, medians, seconds
from torch import Tensor, nn

from vlightning.callbacks.learngene.expansion import expand_learngene
from vlightning.callbacks.learngene.file import Learngene, load_learngene, save_learngene
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.lightning_modules import MMLGModule
from vlightning.lightning_modules.mmlg.network import LearngeneCLIP
from vlightning.lightning_modules.mmlg.students import PlainCLIP
from vlightning.lightning_modules.networks.attention import SelfAttention, set_clip_attention

STUDENTS = {"open_clip": "plain", "plain": "plain", "MM-LG": "MM-LG", "TLEG": "TLEG"}


class Step:
    """A module with its teacher and optimizer, which takes steps as the Trainer does."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.module = MMLGModule(STUDENTS[way])  # type: ignore[arg-type]
        if way == "open_clip":
            for part in self.module.student.modules():
                if isinstance(part, SelfAttention):
                    part.__class__ = nn.MultiheadAttention
        self.module.teacher.network = open_clip.create_model("ViT-B-16-quickgelu").requires_grad_(False).eval()
        set_clip_attention(self.module.teacher.network)
        self.module.teacher_scale = 100.0
        self.module.log = lambda *_, **__: None  # type: ignore[method-assign]
        self.module._trainer = None
        optimizers: Any = self.module.configure_optimizers()
        self.optimizer = optimizers["optimizer"]

    def __call__(self, batch: dict[str, Tensor], precision: str) -> None:
        """Run forward and backward pass and optimizer."""
        self.optimizer.zero_grad()
        with autocast(precision):
            loss = self.module.training_step(batch, 0)
        loss.backward()
        self.optimizer.step()


def make_batch(rows: int) -> dict[str, Tensor]:
    """Return random images and captions of about twenty tokens."""
    ids = torch.randint(1, 49406, (rows, 77))
    ids[:, 20:] = 0
    ids[:, 20] = 49407
    return {"image": torch.rand(rows, 3, 224, 224), "input_ids": ids}


def step(options: argparse.Namespace) -> None:
    """Print the table of times."""
    batch = make_batch(options.batch)
    steps = {way: Step(way) for way in STUDENTS}
    print(f"step, {options.batch} pairs, {torch.get_num_threads()} threads; seconds, and share of open_clip's")
    print(f"{'':14}" + "".join(f"{precision:>20}" for precision in PRECISIONS))
    found = {
        precision: medians(
            {way: lambda run=run, precision=precision: run(batch, precision) for way, run in steps.items()},
            options.repeats,
        )
        for precision in PRECISIONS
    }
    for way in steps:
        cells = (f"{times[way]:10.2f} {times[way] / times['open_clip']:8.0%}" for times in found.values())
        print(f"{way:14}" + "".join(f"{cell:>20}" for cell in cells))


def memory(options: argparse.Namespace) -> None:
    """Print the table of peak memory."""
    print("peak memory over the baseline; GiB, and share of open_clip's")
    print(f"{'':14}" + "".join(f"{precision:>20}" for precision in PRECISIONS))
    base: dict[str, float] = {}
    for way in STUDENTS:
        cells = []
        for precision in PRECISIONS:
            words = ["--measure", way, precision, f"--batch={options.batch}"]
            command = [sys.executable, __file__, *words]
            peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
            base.setdefault(precision, peak)
            cells.append(f"{peak:10.2f} {peak / base[precision]:8.0%}")
        print(f"{way:14}" + "".join(f"{cell:>20}" for cell in cells))


def measure(options: argparse.Namespace) -> None:
    """Print the memory of one variant in GiB."""
    way, precision = options.measure
    bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run, batch = Step(way), make_batch(options.batch)
    for _ in range(3):
        run(batch, precision)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - bare) / 2**20)


def expansion(options: argparse.Namespace) -> None:
    """Print the number of stored values, and the seconds of an expansion."""
    sizes = LearngeneSizes()
    auxiliary = LearngeneCLIP(sizes)
    stored = sum(parameter.numel() for parameter in auxiliary.parameters())
    with torch.device("meta"):
        plain = {
            depth: sum(parameter.numel() for parameter in PlainCLIP(LearngeneSizes(layers=depth)).parameters())
            for depth in range(6, 13)
        }
    three = sum(plain[depth] for depth in (12, 8, 6))
    print(f"stored: {stored:,} numbers, three plain models of 12, 8 and 6 layers {three:,}: {stored / three:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "learngene.safetensors"
        state = {name: tensor.detach() for name, tensor in auxiliary.state_dict().items()}
        save_learngene(Learngene(state, sizes, "MM-LG"), file)
        for depth, count in plain.items():

            def expand(depth: int = depth) -> None:
                expand_learngene(load_learngene(file), PlainCLIP(LearngeneSizes(layers=depth)))

            taken = sorted(seconds(expand) for _ in range(options.repeats))[options.repeats // 2]
            print(f"{depth:3} layers a tower, {count / 1e6:6.2f} M parameters: {taken:5.2f} s")


def main() -> None:
    """Print the tables."""
    tables = {"step": step, "memory": memory, "expansion": expansion}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tables)
    parser.add_argument("--batch", type=int, default=16, help="pairs in a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "PRECISION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    print(f"torch {torch.__version__}; {json.dumps(vars(options))}")
    for name, table in tables.items():
        if options.only in (None, name):
            table(options)


if __name__ == "__main__":
    main()
