"""Memory, images per second, hours and disk of a reinforcement, from the forward passes of one batch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...common.errors import UserError
from ...datamodules.reinforced.reinforcement import stored_bytes
from ...lightning_modules.core.frozen import without_weights
from ...lightning_modules.mobileclip.captioner import Captioner, ExamplePass
from .configuration import Planned
from .counted_step import PRECISIONS, Answers, CountStep, as_on_gpu, fake_tensors, make_fake
from .estimate import GIB, USABLE, Layout, fits, line, memory_lines

PAIRS = 1_000_000
"""Number of pairs for which hours and disk are given, unless the user gives a number of steps."""
AUGMENTATIONS, TEXTS, IMAGES, TOKENS = "augmentations", "texts", "images to caption", "tokens of captions"
"""Kinds of forward passes: of teachers the first two, of the captioner the others."""


class Passes(NamedTuple):
    """Forward passes of one batch in one process.

    Attributes:
        weights: bytes of the networks by their role.
        batch: bytes of the images on the device.
        peak: bytes of activations at their peak.
        flops: operations by kind of pass.
        read: bytes that the captioner reads token by token: its decoder's weights, once for each.
        width: sum of the embedding dimensions.
    """

    weights: dict[str, int]
    batch: int
    peak: int
    flops: Mapping[str, int]
    read: int
    width: int

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of a process by kind."""
        return self.weights | {"images": self.batch, "activations": self.peak}

    def seconds(self, layout: Layout) -> float:
        """Return the time of a batch; captions take at least the time to read the decoder's weights."""
        tokens = max(self.flops[TOKENS] / layout.speed, self.read / layout.gpu.bandwidth)
        return tokens + sum(flops for kind, flops in self.flops.items() if kind != TOKENS) / layout.speed


def is_reinforcement(module: Any) -> bool:
    """Return whether a module, or a class of modules, reinforces data instead of training."""
    return getattr(module, "trains", True) is False


def plan_reinforcement(planned: Planned, layout: Layout, steps: int | None) -> str:
    """Return the plan of a reinforcement.

    Raises:
        UserError: If there is no datamodule, a captioner has no plan, or a teacher is a network of one's own.
    """
    data = planned.data
    module = planned.module
    if "augmentations" not in data:
        raise UserError("Expected data to reinforce, got none: give --data ReinforcementDataModule.")
    captioners = _captioners(module)
    captions = module.captions or 1
    source = "" if module.captions else ", for those of the data are not read"
    with torch.device("meta"), Answers(), without_weights():
        module.load()
    with fake_tensors():
        make_fake(module, PRECISIONS[layout.precision] if layout.precision.endswith("-true") else None)
        counted = _count(module, captioners, layout, data["augmentations"], captions)
        pairs = PAIRS if steps is None else steps * layout.batch
        stored = pairs * stored_bytes(data["augmentations"], 1 + captions, counted.width, data["embeddings"])
        paragraphs = [
            "Computed from the shapes of forward passes, not measured on a GPU.",
            layout.sentence(type(module).__name__),
            f"{data['augmentations']} augmentations and {captions} synthetic captions of an image{source}.",
            "",
            *memory_lines({"": counted.memory}, layout.gpu.memory),
            "",
            _time(counted, layout, pairs, stored),
        ]
        if not fits(counted.memory, layout.gpu.memory):
            paragraphs += ["", _remedy(module, captioners, layout, data["augmentations"], captions)]
    return "\n".join(paragraphs)


def _captioners(module: Any) -> list[Any]:
    """Return the captioners of a module, each of which has an `example_pass`."""
    captioners = [] if module.captioner is None else getattr(module.captioner, "captioners", [module.captioner])
    for captioner in captioners:
        if type(captioner).example_pass is Captioner.example_pass:
            raise UserError(
                f"Expected a captioner with an example pass to plan for, or none, got {type(captioner).__name__}: "
                "plan without it by --model.captioner null."
            )
    if any(teacher.network is not None for teacher in module.ensemble.teachers):
        raise UserError(
            "Expected teachers of open_clip to plan for, got a network of your own in model.teachers: leave it out."
        )
    return list(captioners)


class _Counter:
    """Operations by kind of pass, and the peak of activations of all passes.

    Args:
        present: tensors that are no activations.
    """

    def __init__(self, present: list[Tensor]) -> None:
        self.present = present
        self.flops: Counter[str] = Counter({kind: 0 for kind in (AUGMENTATIONS, TEXTS, IMAGES, TOKENS)})
        self.peak = 0

    @contextmanager
    def passing(self, kind: str) -> Iterator[None]:
        """Count what runs inside the context."""
        with CountStep(self.present, 0, ()) as counting:
            yield
        if counting.failed is not None:
            raise counting.failed
        self.flops[kind] += counting.flops
        self.peak = max(self.peak, counting.peak)


@torch.no_grad()
def _count(module: Any, captioners: list[Any], layout: Layout, augmentations: int, captions: int) -> Passes:
    """Run the forward passes of a batch of one process, and count them."""
    ensemble = module.ensemble
    rows = layout.rows
    half = PRECISIONS[layout.precision]
    mixed = layout.precision.endswith("-mixed")
    views = [torch.zeros(rows, augmentations, side, side, 3, dtype=torch.uint8) for side, _ in ensemble.views]
    kind = torch.float32 if mixed or half is None else half
    passes: list[ExamplePass] = [captioner.example_pass(rows, kind) for captioner in captioners]
    images = [*views, *(example.images for example in passes)]
    counter = _Counter([*module.parameters(), *module.buffers(), *images])
    with torch.autocast("cpu", half or torch.bfloat16, enabled=mixed), as_on_gpu():
        with counter.passing(AUGMENTATIONS):
            ensemble.embed_images(views)
        with counter.passing(TEXTS):
            ensemble.embed_texts(["a"] * (rows * (1 + captions)), torch.device("cpu"))
        for example in passes:
            with counter.passing(IMAGES):
                tokens = example.encode(example.images)
            with counter.passing(TOKENS):
                example.decode(tokens)
    weights = {"teachers": _bytes(ensemble), "captioners": sum(_bytes(captioner) for captioner in captioners)}
    batch = sum(tensor.nbytes for tensor in images)
    read = sum(example.bytes_read for example in passes)
    return Passes(weights, batch, counter.peak, counter.flops, read, sum(ensemble.widths))


def _bytes(network: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


def _time(counted: Passes, layout: Layout, pairs: int, stored: float) -> str:
    lines = ["TFLOP of an image"]
    lines += [line(kind, f"{flops / layout.rows / 1e12:.3f}") for kind, flops in counted.flops.items()]
    speed = layout.batch / counted.seconds(layout)
    hours = pairs / speed / 3600
    return "\n".join(
        [
            *lines,
            "",
            f"{speed:,.1f} images/s at {layout.rate_sentence()}; tokens of captions take at least the reads of their "
            f"decoder's weights at {layout.gpu.bandwidth / 1e12:g} TB/s.",
            f"{pairs:,} pairs: {hours:,.2f} hours, {hours * layout.processes:,.2f} GPU hours, without waiting for "
            f"images and disks; {stored / 1e9:,.1f} GB of shards beside the files of the images.",
        ]
    )


def _remedy(module: Any, captioners: list[Any], layout: Layout, augmentations: int, captions: int) -> str:
    """Return a smaller batch of forward passes with which it fits, or that there is none."""
    size = module.ensemble.forward_batch // 2
    while size:
        module.ensemble.forward_batch = size
        counted = _count(module, captioners, layout, augmentations, captions)
        if fits(counted.memory, layout.gpu.memory):
            needed = sum(counted.memory.values())
            hours = PAIRS / (layout.batch / counted.seconds(layout)) / 3600
            return (
                f"It does not fit in {USABLE:.0%} of {layout.gpu_name}. It does with --model.forward_batch {size}: "
                f"{needed / GIB:.1f} GiB ({needed / layout.gpu.memory:.0%}), {hours:,.2f} hours for {PAIRS:,} pairs."
            )
        size //= 2
    return (
        f"It does not fit in {USABLE:.0%} of {layout.gpu_name}, and no --model.forward_batch was found with which it "
        "does: give another --gpu, --precision bf16-true, or a smaller --batch."
    )
