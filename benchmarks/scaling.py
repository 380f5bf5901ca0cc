"""Two processes against one, for each method: speed, bytes sent by kind, and the cost of resume and checks per step.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --methods albef shre --steps 20 --pairs 16

Real training steps under a Trainer: the method's own callbacks, `SkipNonFiniteSteps` and `StopOnSignal`, DDP over gloo
on this machine, one thread per process, batches in memory. Networks are small, so that a step takes a fraction of a
second; every process has `--pairs` pairs a step.

"copies" are two independent processes that run at the same time: the speed that the machine allows two processes, which
share its caches, memory and clock. "one", "copies" and "two" are interleaved; speeds are medians over the rounds of
medians over their steps, milliseconds are medians over all steps. The time of a flag includes waiting for the other
process.

The position in the data costs nothing in a step: it is computed from the Trainer's counters on resume.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.distributed as dist
from formulas import Run, describe, traffic
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from traffic import TrafficOfSteps, on_the_wire, totals

from vlightning.callbacks import (
    EMACallback,
    QueueCallback,
    SkipNonFiniteSteps,
    StepSeedCallback,
    StopOnSignal,
)
from vlightning.lightning_modules import (
    ALBEFModule,
    CoCoRDModule,
    MMLGModule,
    MobileCLIPModule,
    SHReModule,
)
from vlightning.lightning_modules.albef import settings as albef_settings
from vlightning.lightning_modules.mmlg.settings import (
    TeacherSettings,
    TextSettings,
    TowerSettings,
    VisionSettings,
)
from vlightning.lightning_modules.networks.classifiers import build_classifier

Batch = dict[str, Tensor]
CLASSES, WORDS, TOKENS, SIZE = 100, 2000, 24, 64
TEACHER_CLIP = "clip-of-the-scaling-benchmark"
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
# Purpose, by the callback whose hooks are timed.
COSTS: dict[type[Callback], str] = {
    StepSeedCallback: "step seed",
    StopOnSignal: "stop flag",
    SkipNonFiniteSteps: "finite check",
    EMACallback: "averages",
    QueueCallback: "queues",
}
WARM_UP = 3


def albef(folder: Path) -> LightningModule:
    """Return an ALBEF with three fusion layers and a ViT of six."""
    return ALBEFModule(
        vision=albef_settings.VisionSettings(image_size=SIZE, patch_size=8, width=192, depth=6, heads=3),
        text=albef_settings.TextSettings(vocab_size=WORDS, width=192, heads=3, ffn_width=768, depth=3, fusion_depth=3),
        contrast=albef_settings.ContrastSettings(embed_dim=128, queue_size=4096),
    )


def cocord(folder: Path) -> LightningModule:
    """Return a distillation from resnet32x4 to resnet8x4 on images of CIFAR's size."""
    return CoCoRDModule("resnet8x4", CLASSES, teacher={"name": "resnet32x4", "weights": str(classifier_file(folder))})


def mmlg(folder: Path) -> LightningModule:
    """Return an auxiliary of twelve layers, with a CLIP of four layers as the teacher."""
    add_clip(folder)
    return MMLGModule(
        towers=TowerSettings(width=128, heads=2, embed_dim=128),
        vision=VisionSettings(image_size=SIZE, patch_size=8),
        text=TextSettings(max_tokens=TOKENS, vocab_size=WORDS),
        teacher=TeacherSettings(TEACHER_CLIP, str(folder / "clip.safetensors")),
    )


def mobileclip(folder: Path) -> LightningModule:
    """Return the smallest student, with teachers of the published dimensions."""
    return MobileCLIPModule("MobileCLIP-tiny", max_tokens=TOKENS, vision={"image_size": SIZE})


def shre(folder: Path) -> LightningModule:
    """Return encoders of four layers, with a classifier of CIFAR's image size."""
    return SHReModule(
        CLASSES,
        teacher={"name": "resnet32x4", "weights": str(classifier_file(folder))},
        vision={"image_size": SIZE, "patch_size": 8, "width": 192, "heads": 3, "depth": 4},
        text={"max_tokens": TOKENS, "vocab_size": WORDS, "depth": 4},
    )


METHODS: dict[str, Callable[[Path], LightningModule]] = {
    "albef": albef,
    "cocord": cocord,
    "mmlg": mmlg,
    "mobileclip": mobileclip,
    "shre": shre,
}


def classifier_file(folder: Path) -> Path:
    """Write the file of a classifier with random weights."""
    path = folder / "classifier.pth"
    if not path.exists():
        torch.manual_seed(1)
        network: Any = build_classifier("resnet32x4", CLASSES)
        torch.save({"model": network.state_dict()}, path)
    return path


def add_clip(folder: Path) -> None:
    """Register a small model with open_clip, and write random weights."""
    towers = {"layers": 4, "width": 192}
    config = {
        "embed_dim": 128,
        "vision_cfg": {"image_size": SIZE, "patch_size": 8, "head_width": 64, **towers},
        "text_cfg": {"context_length": TOKENS, "vocab_size": WORDS, "heads": 3, **towers},
    }
    path = folder / f"{TEACHER_CLIP}.json"
    path.write_text(json.dumps(config))
    open_clip.add_model_config(path)
    weights = folder / "clip.safetensors"
    if not weights.exists():
        torch.manual_seed(1)
        logging.disable(logging.WARNING)  # about random weights
        save_file(open_clip.create_model(TEACHER_CLIP).state_dict(), weights)


class RandomBatches(IterableDataset[Batch]):
    """One batch that is repeated; each process has its own."""

    def __init__(self, method: str, pairs: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
        side = 32 if method == "cocord" else SIZE

        def image() -> Tensor:
            return torch.randn(pairs, 3, side, side, generator=generator)

        def text() -> Tensor:
            ids = torch.randint(104, WORDS - 1, (pairs, TOKENS), generator=generator)
            ids[:, -1] = WORDS - 1
            return ids

        def teachers() -> Tensor:
            return torch.nn.functional.normalize(torch.randn(pairs, 768 * 2, generator=generator))

        self.batch = {"image": image(), "input_ids": text(), "sample_index": torch.arange(pairs)}
        self.batch["image_id"] = torch.randint(2**40, (pairs,), generator=generator)
        if method == "cocord":
            self.batch |= {"image_slow": image(), "image_teacher": image()}
            self.batch["label"] = torch.randint(CLASSES, (pairs,), generator=generator)
        elif method == "mobileclip":
            self.batch["synthetic_input_ids"] = text()
            self.batch |= {f"teacher_{name}": teachers() for name in ("image", "text", "synthetic")}
        else:
            self.batch["attention_mask"] = torch.ones_like(self.batch["input_ids"])
        self.steps = steps

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch for _ in range(self.steps))

    def __len__(self) -> int:
        return self.steps


class Clock(Callback):
    """Measure each step, from the start of its batch to the start of the next, and the hooks of the callbacks."""

    def __init__(self, ready: Callable[[], None]) -> None:
        self.ready = ready
        self.starts: list[float] = []
        self.hooks: dict[str, list[float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the hooks with timers, and wait for the processes that run at the same time."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if name := COSTS.get(type(callback)):
                self.hooks[name] = []
                for hook in HOOKS:
                    setattr(callback, hook, self._timed(getattr(callback, hook), self.hooks[name]))
        self.ready()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End a step and begin the next one."""
        self.starts.append(time.perf_counter())
        for taken in self.hooks.values():
            taken.append(0.0)

    def _timed(self, hook: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                if taken:
                    taken[-1] += time.perf_counter() - start

        return timed

    def found(self) -> dict[str, Any]:
        """Return the seconds of the steps after warm-up."""
        steps = [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]
        return {
            "steps": steps[WARM_UP:],
            "hooks": {name: taken[WARM_UP : len(steps)] for name, taken in self.hooks.items()},
        }


def train(method: str, folder: Path, pairs: int, steps: int, rank: int, way: str) -> dict[str, Any]:
    """Train in this process, alone or as one of two.

    Args:
        method: name of the method.
        folder: folder that is shared with the other process.
        pairs: pairs of this process in a step.
        steps: number of timed steps.
        rank: rank of this process.
        way: "one", "copies" or "two".
    """
    torch.set_num_threads(1)
    processes = 2 if way == "two" else 1
    strategy: Any = "auto"
    if processes > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, timedelta(minutes=5), world_size=processes, rank=rank)
        # With LOCAL_RANK set, Lightning launches no process and uses the existing process group.
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(processes)}
        strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
        strategy.cluster_environment = LightningEnvironment()
    seed_everything(0, verbose=False)
    module = METHODS[method](folder)

    def ready() -> None:
        if way == "copies":
            (folder / f"ready{rank}").touch()
            while not (folder / f"ready{1 - rank}").exists():
                time.sleep(0.01)

    clock, counted = Clock(ready), TrafficOfSteps()
    total = WARM_UP + steps + 1
    # In a separate run, because counting the traffic intercepts every operation of torch.
    watching: list[Callback] = [counted] if way == "two" and steps == 0 else [clock]
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy,
        max_steps=total,
        callbacks=[*watching, SkipNonFiniteSteps(), StopOnSignal()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(RandomBatches(method, pairs, total), batch_size=None))
    if counted.steps:
        least = traffic(describe(module), Run(pairs * processes, processes))
        found = {"sent": totals(counted.steps[WARM_UP - 1]), "least": least}
    else:
        found = clock.found()
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def start(method: str, way: str, pairs: int, steps: int, shared: Path) -> list[dict[str, Any]]:
    """Run the processes of a variant, and return the results of each."""
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        for teacher in shared.glob("*.pth"):
            (Path(folder) / teacher.name).symlink_to(teacher)
        for teacher in shared.glob("*.safetensors"):
            (Path(folder) / teacher.name).symlink_to(teacher)
        words = [method, way, str(pairs), str(steps), folder]
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        environment = os.environ | threads | {"PYTHONWARNINGS": "ignore"}
        output = Path(folder) / "output.txt"
        with output.open("w") as file:
            running = [
                subprocess.Popen(
                    [sys.executable, __file__, "--process", *words, str(rank)],
                    env=environment | {"RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(1 if way == "one" else 2)
            ]
            failed = any([process.wait() for process in running])
        if failed:
            raise SystemExit(f"{method}, {way}: a process failed.\n{output.read_text()[-3000:]}")
        return [json.loads((Path(folder) / f"found{rank}.json").read_text()) for rank in range(len(running))]


def measure(method: str, options: Any, shared: Path) -> None:
    """Print the three tables of a method."""
    turns: list[dict[str, float]] = []  # pairs a second
    milliseconds: list[float] = []
    hooks: dict[str, dict[str, list[float]]] = {"one": {}, "two": {}}
    for _ in range(options.turns):
        turns.append({})
        for way in ("one", "copies", "two"):
            found = start(method, way, options.pairs, options.steps, shared)
            # The copies have different speeds; processes that step together have the same.
            turns[-1][way] = sum(options.pairs / statistics.median(process["steps"]) for process in found)
            milliseconds += [1000 * taken for taken in found[0]["steps"]] if way == "one" else []
            for name, taken in found[0]["hooks"].items() if way in hooks else ():
                hooks[way].setdefault(name, []).extend(taken)
    one, copies, two = (statistics.median(turn[way] for turn in turns) for way in ("one", "copies", "two"))
    print(
        f"\n{method}: a step of one process {statistics.median(milliseconds):.0f} ms; {one:.1f} pairs/s, two copies "
        f"{copies:.1f}, two processes {two:.1f}: {_ratio(turns, 'one')} times one, {_ratio(turns, 'copies')} of two "
        "copies",
        flush=True,
    )
    (sent, *_) = start(method, "two", options.pairs, 0, shared)
    print(f"  {'sent in a step of two processes':32} {'operation':15} {'calls':>5} {'bytes':>12} {'least':>12}")
    for kind in sorted({**sent["sent"], **sent["least"]}, key=lambda kind: -sent["sent"].get(kind, [0, 0, 0])[2]):
        operation, calls, size = sent["sent"].get(kind, ("none", 0, 0))
        least = sent["least"].get(kind, (operation, 0, 0))[2]
        cells = (on_the_wire(operation, number, 2) if number else 0.0 for number in (size, least))
        print(f"  {kind:32} {operation:15} {calls:5}", *(f"{cell:12,.0f}" for cell in cells))
    print(f"  {'milliseconds of a step':32} {'one process':>15} {'two':>18}")
    for name in hooks["one"]:
        cells = (1000 * statistics.median(hooks[way][name]) for way in ("one", "two"))
        print("  {:32} {:15.3f} {:18.3f}".format(name, *cells), flush=True)


def _ratio(turns: list[dict[str, float]], other: str) -> str:
    """Return the speed of two processes relative to another variant: median, minimum and maximum over the rounds."""
    found = [turn["two"] / turn[other] for turn in turns]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    """Measure the methods, and print the tables of each."""
    if sys.argv[1:2] == ["--process"]:
        method, way, pairs, steps, folder, rank = sys.argv[2:]
        found = train(method, Path(folder), int(pairs), int(steps), int(rank), way)
        (Path(folder) / f"found{rank}.json").write_text(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each process and round")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of each process in a step")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load}; {options.pairs} pairs a process and step")
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder)
        classifier_file(shared)
        add_clip(shared)
        for method in options.methods:
            measure(method, options, shared)


if __name__ == "__main__":
    main()
