"""One pass of a model over images or texts; processes share both, and all get the whole result."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..callbacks.distributed.collectives import gather_texts, gather_uneven, rank, world_size
from ..datamodules.core.faults import NAMED_PER_CAUSE, BadSample
from ..datamodules.core.loaders import outlast_signals
from ..metrics.zero_shot import class_embeddings, class_prompts
from .model import ImageTextModel

log = logging.getLogger(__name__)
_TEXTS = 256  # that are encoded at a time


class Sample(NamedTuple):
    """An image, float [3, S, S]; its label, long [], or -1; other numbers, float64 [M]."""

    image: Tensor
    label: Tensor
    metadata: Tensor


@dataclass(frozen=True)
class Loading:
    """How images are read.

    Args:
        batch_size: Images of a process in a batch.
        num_workers: Loader workers of a process.
    """

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

    def __getitem__(self, place: int) -> tuple[int, Any]:
        number = self.numbers[place]
        try:
            return number, self.samples[number]
        except BadSample as bad:
            return number, bad.fault


def encode_images(model: ImageTextModel, samples: Any, loading: Loading) -> Encoded:
    """Encode each image of a set once.

    Args:
        model: The model.
        samples: A set of `Sample` by number, which raises `BadSample` for those that cannot be used.
        loading: How images are read.
    """
    index, features, labels, metadata = [], [], [], []
    bad: Counter[str] = Counter()
    named: list[str] = []
    for batch in batches(samples, loading):
        used = [(number, sample) for number, sample in batch if isinstance(sample, Sample)]
        for _, fault in (pair for pair in batch if not isinstance(pair[1], Sample)):
            bad[fault.cause] += 1
            if bad[fault.cause] <= NAMED_PER_CAUSE:
                named.append(f"{fault.name} ({fault.cause})")
                log.warning("Sample %s is unusable (%s): left out", fault.name, fault.cause)
        if used:
            index += [number for number, _ in used]
            features.append(model.encode_images(torch.stack([sample.image for _, sample in used])).cpu())
            labels += [sample.label for _, sample in used]
            metadata += [sample.metadata for _, sample in used]
    return _gathered(index, features, labels, metadata, bad, named)


def batches(samples: Any, loading: Loading) -> Iterator[list[tuple[int, Any]]]:
    """Iterate over this process's samples in batches of pairs: the number, and the sample or its fault."""
    loader: DataLoader[Any] = DataLoader(
        _Share(samples),
        loading.batch_size,
        num_workers=loading.num_workers,
        collate_fn=list,
        worker_init_fn=outlast_signals,
        generator=torch.Generator().manual_seed(0),
    )
    yield from loader


def _gathered(
    index: list[int],
    features: list[Tensor],
    labels: list[Tensor],
    metadata: list[Tensor],
    bad: Counter[str],
    named: list[str],
) -> Encoded:
    """Return the samples of all processes in their order."""
    # A process without an image learns the sizes from the others.
    mine = [features[0].shape[1] if features else 0, max((len(row) for row in metadata), default=0)]
    width, columns = gather_uneven(torch.tensor([mine])).amax(0).tolist()
    # Some sets have numbers beside part of their samples only: NaN stands for those that are missing.
    numbers = torch.full((len(index), columns), torch.nan, dtype=torch.float64)
    for row, values in enumerate(metadata):
        numbers[row, : len(values)] = values
    found = gather_uneven(torch.tensor(index, dtype=torch.long))
    order = found.argsort()
    causes = gather_texts([cause for cause, count in bad.items() for _ in range(count)])
    return Encoded(
        found[order],
        gather_uneven(torch.cat(features) if features else torch.zeros(0, width))[order],
        gather_uneven(torch.stack(labels) if labels else torch.zeros(0, dtype=torch.long))[order],
        gather_uneven(numbers)[order],
        dict(Counter(causes)),
        gather_texts(named),
    )


def encode_texts(model: ImageTextModel, texts: Sequence[str]) -> Tensor:
    """Return unit-length features [T, E] of texts, on the CPU, the same in every process."""
    share = ceil(len(texts) / world_size())
    mine = texts[rank() * share : (rank() + 1) * share]
    parts = [model.encode_texts(mine[start : start + _TEXTS]).cpu() for start in range(0, len(mine), _TEXTS)]
    width = int(gather_uneven(torch.tensor([parts[0].shape[1] if parts else 0])).max())
    return gather_uneven(torch.cat(parts) if parts else torch.zeros(0, width))


def encode_classes(model: ImageTextModel, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return unit-length embeddings [C, E] of classes: the normalized mean of the embeddings of their prompts."""
    at_once = max(1, 4096 // len(templates))  # classes whose prompts are in memory
    groups = [names[start : start + at_once] for start in range(0, len(names), at_once)]
    prompts = (encode_texts(model, class_prompts(group, templates)) for group in groups)
    return torch.cat([class_embeddings(features, len(templates)) for features in prompts])
