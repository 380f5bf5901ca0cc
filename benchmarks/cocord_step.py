"""One CoCoRD training step against the sum of its forward and backward passes, timed in the same process.

    python benchmarks/cocord_step.py
    python benchmarks/cocord_step.py --teacher resnet56 --student resnet20

The lower bound ("floor") of any implementation is two forward and backward passes of the student, two forward passes of
the slow student and one of the teacher, each in the mode of the method. The remaining parts of a step are heads,
predictor, dictionary, losses, optimizer, averages and the queue. Times are medians of interleaved calls.

Student and slow student process their two views one after the other, since BatchNorm's statistics in train mode are
those of a batch; both views in one batch would be another function than the authors'. Linear layers of heads and
predictor process both views in one pass, and so does the teacher, in eval mode. `--joined` also measures one pass of
both views through the student, and through the slow student.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import PRECISIONS, autocast, medians

from vlightning.callbacks import EMACallback
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.cocord.losses import dictionary_loss, same_class_share

Batch = dict[str, torch.Tensor]


class Step:
    """A module with its optimizer, averages and queue, which takes steps as the Trainer does."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.module = CoCoRDModule(
            options.student,
            options.classes,
            teacher={"name": options.teacher},
            contrast={"queue_start": "random"},
        )
        self.module.to(memory_format=torch.channels_last)  # as `configure_model` does
        self.module.log = lambda *_, **__: None  # type: ignore[method-assign]
        self.module.log_dict = lambda *_, **__: None  # type: ignore[method-assign]
        self.ema = EMACallback(self.module.momentum_pairs(), log=False)
        optimizers: Any = self.module.configure_optimizers()
        self.optimizer = optimizers["optimizer"]

    def __call__(self, batch: Batch, precision: str) -> None:
        """Run forward and backward pass, optimizer, averages and dictionary."""
        self.optimizer.zero_grad()
        with autocast(precision):
            outputs = self.module.training_step(batch, 0)
        outputs["loss"].backward()
        self.optimizer.step()
        self.ema.update(self.module)
        self.enqueue(outputs)

    def enqueue(self, outputs: dict[str, Any]) -> None:
        """Enqueue the keys of a batch, as `QueueCallback` does."""
        for name, queue in self.module.queues().items():
            queue.enqueue(outputs["keys"][name], outputs["key_ids"][name])


def passes(step: Step, batch: Batch, precision: str) -> dict[str, Callable[[], None]]:
    """Return the passes of the floor, one by one."""
    module = step.module
    assert module.teacher is not None
    assert module.slow_student is not None
    student, slow, teacher = module.student, module.slow_student, module.teacher.network
    views = [batch[name].contiguous(memory_format=torch.channels_last) for name in ("image", "image_slow")]

    def train(images: torch.Tensor) -> None:
        student.zero_grad()
        with autocast(precision):
            logits = student(images)
        F.cross_entropy(logits.float(), batch["label"].repeat(len(images) // len(batch["label"]))).backward()

    def infer(network: Any, images: torch.Tensor) -> None:
        with torch.no_grad(), autocast(precision):
            network.forward_features(images)

    return {
        "student, forward and backward, view 1": lambda: train(views[0]),
        "student, forward and backward, view 2": lambda: train(views[1]),
        "slow student, forward, view 1": lambda: infer(slow, views[0]),
        "slow student, forward, view 2": lambda: infer(slow, views[1]),
        "teacher, forward": lambda: infer(teacher, views[0]),
        "joined: student, both views": lambda: train(torch.cat(views)),
        "joined: slow student, both views": lambda: infer(slow, torch.cat(views)),
    }


def extras(step: Step, batch: Batch, precision: str) -> dict[str, Callable[[], None]]:
    """Return parts of a step beyond the floor."""
    module = step.module
    assert module.student_head is not None
    assert module.predictor is not None
    head, predictor, dictionary = module.student_head, module.predictor, module.dictionary
    temperature = module.contrast.temperature
    features = torch.randn(len(batch["label"]), module.student.feature_dim)
    key = torch.randn(len(batch["label"]), 2048)

    def heads() -> None:
        with autocast(precision):
            predictor(head(features)).float().sum().backward()

    def contrast() -> None:
        query = key.clone().requires_grad_()
        assert dictionary is not None
        same_class_share(batch["label"], dictionary)
        dictionary_loss(query, key, dictionary, temperature).backward()

    outputs = {"keys": {"dictionary": F.normalize(key)}, "key_ids": {"dictionary": batch["label"]}}
    return {
        "head and predictor, forward and backward": heads,
        "contrast with the dictionary": contrast,
        "optimizer": step.optimizer.step,
        "averages": lambda: step.ema.update(module) and None,
        "enqueue": lambda: step.enqueue(outputs),
    }


def main() -> None:
    """Print a table for each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="resnet32x4")
    parser.add_argument("--student", default="resnet8x4")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="side of the images, pixels")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--joined", action="store_true", help="also time both views in one pass")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, 3, options.size, options.size)
    batch = {name: torch.randn(shape, generator=generator) for name in ("image", "image_slow", "image_teacher")}
    batch["label"] = torch.randint(options.classes, (options.batch,), generator=generator)
    step = Step(options)
    for precision in PRECISIONS:
        step(batch, precision)  # creates gradients and momenta
    dictionary = step.module.queues()["dictionary"].features
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {options.teacher} -> {options.student}, batch "
        f"{options.batch}, {options.size} px; dictionary of {dictionary.numel() * dictionary.element_size():,} bytes"
    )
    rows: dict[str, list[float]] = {}
    for precision in PRECISIONS:
        functions: dict[str, Callable[[], Any]] = {"whole step": lambda p=precision: step(batch, p)}
        floor = passes(step, batch, precision)
        if not options.joined:
            floor = {name: function for name, function in floor.items() if not name.startswith("joined")}
        functions |= floor | extras(step, batch, precision)
        measured = medians(functions, options.repeats)
        parts = [value for name, value in measured.items() if name in floor and not name.startswith("joined")]
        measured["floor"] = sum(parts)
        measured["step beyond the floor"] = measured["whole step"] / measured["floor"] - 1
        for name, value in measured.items():
            rows.setdefault(name, []).append(value)
    print(f"{'':42} " + " ".join(f"{precision:>11}" for precision in PRECISIONS))
    for name, values in rows.items():
        cells = (f"{value:11.1%}" if "beyond" in name else f"{1000 * value:8.1f} ms" for value in values)
        print(f"{name:42} " + " ".join(cells))
    rates = " ".join(f"{options.batch / value:11.1f}" for value in rows["whole step"])
    print(f"{'images/s':42} {rates}")


if __name__ == "__main__":
    main()
