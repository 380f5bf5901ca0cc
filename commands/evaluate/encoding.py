"""One pass of a model over images or texts; processes share both, and all get the whole result."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ...callbacks.distributed.collectives import gather_texts, gather_uneven, rank, world_size
from ...common.shown import shown
from ...datamodules.base.faults import NAMED_PER_CAUSE, BadSample, Fault
from ...datamodules.base.loaders import outlast_signals
from ...metrics.classification import class_embeddings, class_prompts
from .model import ImageTextModel

log = logging.getLogger(__name__)
_TEXTS = 256  # that are encoded at a time


class Sample(NamedTuple):
    """An image, uint8 [3, S, S]; its label, or -1; other numbers, float64 [M]."""

    image: Tensor
    label: int = -1
    metadata: np.ndarray = np.zeros(0)


class Batch(NamedTuple):
    """Positions in the set, images, labels and other numbers of the samples that can be used; faults of the others.

    The images are uint8 [B, 3, S, S]; empty, [0], without a sample.
    """

    numbers: list[int]
    images: Tensor
    label: list[int]
    metadata: list[np.ndarray]
    faults: list[Fault]


@dataclass(frozen=True)
class Loading:
    """How a process reads images: images of a batch, and loader workers."""

    batch_size: int = 64
    num_workers: int = 2


@dataclass
class Encoded:
    """The images of a set that could be used, in their order, and counts of the others.

    Attributes:
        index: Positions in the set, long [N].
        features: Unit-length features [N, E], on the CPU.
        label: Labels, long [N].
        metadata: Other numbers, float64 [N, M].
        bad: Number of samples that could not be used, by cause.
        named: Names of some of them.
    """

    index: Tensor
    features: Tensor
    label: Tensor
    metadata: Tensor
    bad: dict[str, int] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)


class _Share(Dataset[Any]):
    """Every N-th sample of a set; a sample that cannot be used becomes its cause and name."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.numbers = range(rank(), len(samples), world_size())

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, position: int) -> tuple[int, Sample | Fault]:
        number = self.numbers[position]
        try:
            return number, self.samples[number]
        except BadSample as bad:
            return number, bad.fault


def encode_images(model: ImageTextModel, samples: Any, loading: Loading) -> Encoded:
    """Encode each image of a set of `Sample` once, without those whose reading raises `BadSample`."""
    index: list[int] = []
    features: list[Tensor] = []
    labels: list[int] = []
    metadata: list[np.ndarray] = []
    bad: Counter[str] = Counter()
    named: list[str] = []
    for batch in batches(samples, loading, pin=model.device.type == "cuda"):
        for fault in batch.faults:
            bad[fault.cause] += 1
            if bad[fault.cause] <= NAMED_PER_CAUSE:
                named.append(f"{fault.name} ({fault.cause})")
                log.warning("Sample %s is unusable (%s): left out", shown(fault.name), fault.cause)
        if batch.numbers:
            index += batch.numbers
            # They stay on the device until the end, so that the host does not wait for each batch.
            features.append(model.encode_images(batch.images))
            labels += batch.label
            metadata += batch.metadata
    # A process without an image learns the sizes from the others.
    sizes = [features[0].shape[1] if features else 0, max((len(row) for row in metadata), default=0)]
    width, columns = gather_uneven(torch.tensor([sizes])).amax(0).tolist()
    # Some sets have numbers beside some of their samples only: NaN stands for those that are missing.
    numbers = torch.full((len(index), columns), torch.nan, dtype=torch.float64)
    for row, values in enumerate(metadata):
        numbers[row, : len(values)] = torch.from_numpy(values)
    indices = gather_uneven(torch.tensor(index, dtype=torch.long))
    order = indices.argsort()
    causes = gather_texts([cause for cause, count in bad.items() for _ in range(count)])
    return Encoded(
        indices[order],
        gather_uneven(torch.cat(features).cpu() if features else torch.zeros(0, width))[order],
        gather_uneven(torch.tensor(labels, dtype=torch.long))[order],
        gather_uneven(numbers)[order],
        dict(Counter(causes)),
        gather_texts(named),
    )


def batches(samples: Any, loading: Loading, pin: bool = False) -> Iterator[Batch]:
    """Iterate over this process's samples in batches, in page-locked memory for a GPU."""
    loader: DataLoader[Batch] = DataLoader(
        _Share(samples),
        loading.batch_size,
        num_workers=loading.num_workers,
        collate_fn=_collated,
        pin_memory=pin,
        worker_init_fn=outlast_signals,
        generator=torch.Generator().manual_seed(0),
    )
    yield from loader


def _collated(pairs: Sequence[tuple[int, Sample | Fault]]) -> Batch:
    """Return a batch; its images are one tensor, since each tensor that a loader worker sends costs system calls."""
    usable = [(number, sample) for number, sample in pairs if isinstance(sample, Sample)]
    return Batch(
        [number for number, _ in usable],
        default_collate([sample.image for _, sample in usable]) if usable else torch.zeros(0, dtype=torch.uint8),
        [sample.label for _, sample in usable],
        [sample.metadata for _, sample in usable],
        [fault for _, fault in pairs if isinstance(fault, Fault)],
    )


def encode_texts(model: ImageTextModel, texts: Sequence[str]) -> Tensor:
    """Return unit-length features [T, E] of texts, on the CPU, the same in every process."""
    share = ceil(len(texts) / world_size())
    texts = texts[rank() * share : (rank() + 1) * share]
    features = [model.encode_texts(texts[start : start + _TEXTS]).cpu() for start in range(0, len(texts), _TEXTS)]
    width = int(gather_uneven(torch.tensor([features[0].shape[1] if features else 0])).max())
    return gather_uneven(torch.cat(features) if features else torch.zeros(0, width))


def encode_classes(model: ImageTextModel, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return unit-length embeddings [C, E] of classes: the normalized mean of the embeddings of their prompts."""
    at_once = max(1, 4096 // len(templates))  # classes whose prompts are in memory
    groups = [names[start : start + at_once] for start in range(0, len(names), at_once)]
    prompts = (encode_texts(model, class_prompts(group, templates)) for group in groups)
    return torch.cat([class_embeddings(features, len(templates)) for features in prompts])
