"""From table rows to batches: what the loader workers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from ..text.tokenizers import Encoder, text_id
from .decode import EMPTY_CAPTION, BadSample, Fault
from .sampling import Key, kept_draws, sample_words, seeded, substitute

Batch = dict[str, torch.Tensor]
Transform = Callable[[Image.Image], torch.Tensor]
ATTEMPTS = 20  # draws before a batch is given up: with half of the rows bad, one in a million


class Rows(Protocol):
    """Rows of a split, of which each has an image, read one at a time and in any order."""

    def __len__(self) -> int:
        """Number of rows."""

    def image(self, row: int) -> Image.Image:
        """The decoded image (RGB); raises :class:`BadSample`."""

    def name(self, row: int) -> str:
        """What messages call the row."""

    def picture_name(self, row: int) -> str:
        """The path of the image where it is a file, else what messages call the row."""


class PairRows(Rows, Protocol):
    """Rows of images and captions."""

    def captions(self, row: int) -> list[str]:
        """The raw captions, as many as there are; raises :class:`BadSample`."""

    def image_id(self, row: int) -> int:
        """Equal for rows that show the same image; raises :class:`BadSample`."""

    def images(self) -> list[list[int]]:
        """The rows of each image, for evaluation."""

    def texts(self) -> Iterator[str]:
        """All captions, to train a tokenizer on."""


class Reader(Protocol):
    """Makes a training sample of a row."""

    def __call__(self, row: int, words: tuple[int, int]) -> Any:
        """Read a row with the draws of :func:`sample_words`; raises :class:`BadSample`."""


class Sample(NamedTuple):
    """One usable image with the captions that go with it."""

    image: torch.Tensor
    captions: list[str]
    image_id: int
    sample_index: int


@dataclass
class Outcome:
    """What came of reading one item: a sample or none, and the faults met on the way."""

    sample: Any
    seen: int = 0
    faults: list[Fault] = field(default_factory=list)


class Collated(NamedTuple):
    """A batch as it leaves a worker, with the account of it; the loader keeps the account and passes on the batch.

    Notes are about samples that are usable.
    """

    batch: Batch | None
    seen: int
    faults: list[Fault]
    notes: Sequence[Fault] = ()


def training_sample(
    load: Callable[[], Image.Image],
    captions: Sequence[str],
    encoder: Encoder,
    transform: Transform,
    words: tuple[int, int],
    name: str,
) -> tuple[torch.Tensor, str]:
    """Decode, augment and draw a caption for one row.

    Args:
        load: decodes the image.
        captions: the row's captions.
        encoder: tells which captions are usable.
        transform: the training transform.
        words: the row's draws, see :func:`sample_words`.
        name: what messages call the row.

    Raises:
        BadSample: there is no usable caption or image.
    """
    usable = [caption for caption in captions if encoder.usable(caption)]
    if not usable:
        raise BadSample(EMPTY_CAPTION, name)
    raw = load()
    with seeded(words[0]):
        image = transform(raw)
    return image, usable[words[1] % len(usable)]


@dataclass
class PairReader:
    """Reads a row as one augmented image with one drawn caption; arguments as in :func:`training_sample`."""

    rows: PairRows
    transform: Transform
    encoder: Encoder

    def __call__(self, row: int, words: tuple[int, int]) -> Sample:
        """Read a row."""
        image, caption = training_sample(
            lambda: self.rows.image(row),
            self.rows.captions(row),
            self.encoder,
            self.transform,
            words,
            self.rows.name(row),
        )
        return Sample(image, [caption], self.rows.image_id(row), row)


class SeededSet(Dataset[Outcome]):
    """A data set whose rows draw inside of :func:`~.sampling.seeded`.

    The process's own draws are put back once for a batch: once for each row would take longer. A subclass has `__len__`
    and `__getitem__`.
    """

    def __getitems__(self, keys: Sequence[Any]) -> list[Outcome]:
        with kept_draws():
            return [self[key] for key in keys]


class TrainingSet(SeededSet):
    """Training rows, each with draws of its own in every epoch; unusable rows are replaced.

    Args:
        length: number of rows.
        read: makes a sample of a row.
        seed: the run's seed.
    """

    def __init__(self, length: int, read: Reader, seed: int) -> None:
        self.length = length
        self.read = read
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Key) -> Outcome:
        epoch, first = key
        faults: list[Fault] = []
        for attempt in range(ATTEMPTS):
            row = substitute(self.seed, epoch, first, attempt, self.length) if attempt else first
            try:
                sample = self.read(row, sample_words(self.seed, epoch, row))
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(sample, attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


class EvaluationSet(SeededSet):
    """Images of an evaluation split, each with all of its captions; unusable ones are left out, never replaced.

    Args:
        table: the rows.
        images: the rows of each image.
        transform: image to float [3, H, W], without randomness.
        encoder: tells which captions are usable.
        seed: the run's seed (a transform that does draw gets the same draws each time).
        need_captions: whether an image without captions counts as unusable.
    """

    def __init__(
        self,
        table: PairRows,
        images: Sequence[Sequence[int]],
        transform: Transform,
        encoder: Encoder,
        seed: int,
        need_captions: bool = True,
    ) -> None:
        self.table = table
        self.images = images
        self.transform = transform
        self.encoder = encoder
        self.seed = seed
        self.need_captions = need_captions

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, image: int) -> Outcome:
        rows = self.images[image]
        captions, faults = captions_of(self.table, rows)
        if len(faults) == len(rows):
            return Outcome(None, len(faults), faults)
        try:
            image_id = self.table.image_id(rows[0])
        except BadSample as bad:
            return Outcome(None, max(1, len(captions)) + len(faults), [*faults, bad.fault])
        outcome = evaluation_outcome(
            lambda: self.table.image(rows[0]), captions, self.table.name(rows[0]), image_id, rows[0], self
        )
        return Outcome(outcome.sample, outcome.seen + len(faults), [*faults, *outcome.faults])


def captions_of(table: PairRows, rows: Sequence[int]) -> tuple[list[str], list[Fault]]:
    """The raw captions of the rows of one image, and what is wrong with the rows of which they cannot be read."""
    captions, faults = list[str](), list[Fault]()
    for row in rows:
        try:
            captions += table.captions(row)
        except BadSample as bad:
            faults.append(bad.fault)
    return captions, faults


class EvaluationParts(Protocol):
    """What :func:`evaluation_outcome` needs to know about the split."""

    transform: Transform
    encoder: Encoder
    seed: int
    need_captions: bool


def evaluation_outcome(
    load: Callable[[], Image.Image], captions: list[str], name: str, image_id: int, index: int, parts: EvaluationParts
) -> Outcome:
    """Decode one image for evaluation and keep its usable captions; empty captions are counted one by one."""
    usable = [caption for caption in captions if parts.encoder.usable(caption)]
    faults = [Fault(EMPTY_CAPTION, name)] * (len(captions) - len(usable))
    if not captions and parts.need_captions:
        faults = [Fault(EMPTY_CAPTION, name)]
    seen = max(1, len(captions))
    if not usable and parts.need_captions:
        return Outcome(None, seen, faults)
    try:
        raw = load()
    except BadSample as bad:
        return Outcome(None, seen, [*faults, bad.fault])
    with seeded(sample_words(parts.seed, 0, index)[0]):
        image = parts.transform(raw)
    return Outcome(Sample(image, usable, image_id, index), seen, faults)


def account(outcomes: Sequence[Outcome]) -> tuple[list[Any], int, list[Fault]]:
    """The samples of a batch, how many were read for it, and what was wrong with some."""
    samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    return samples, sum(outcome.seen for outcome in outcomes), faults


def stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """Images [3, H, W] as a batch [B, 3, H, W]."""
    # Not torch.stack: in a worker this stacks into shared memory, where the batch would be copied to afterwards.
    batch: torch.Tensor = default_collate(images)
    return batch


@dataclass
class TrainingCollate:
    """Training batches: ``image``, ``input_ids``, ``attention_mask``, ``image_id`` and ``sample_index``."""

    encoder: Encoder

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images and encode the captions."""
        samples, seen, faults = account(outcomes)
        if len(samples) < len(outcomes):  # no substitute found either: the loader ends the run
            return Collated(None, seen, faults)
        batch: dict[str, Any] = {
            "image": stacked([sample.image for sample in samples]),
            **self.encoder([sample.captions[0] for sample in samples]),
            "image_id": torch.tensor([sample.image_id for sample in samples]),
            "sample_index": torch.tensor([sample.sample_index for sample in samples]),
        }
        return Collated(batch, seen, faults)


@dataclass
class EvaluationCollate:
    """Batches of the evaluation contract: the images, and all their captions one after another.

    ``text_image_id`` [T] names the image that a caption belongs to, ``text_id`` [T] is equal for equal texts.
    """

    encoder: Encoder
    transform: Transform

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images and encode the captions of all."""
        samples, seen, faults = account(outcomes)
        captions = [caption for sample in samples for caption in sample.captions]
        owners = [sample.image_id for sample in samples for _ in sample.captions]
        batch: dict[str, Any] = {
            "image": stacked([sample.image for sample in samples]) if samples else self._no_images(),
            "image_id": torch.tensor([sample.image_id for sample in samples], dtype=torch.long),
            "sample_index": torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
            **self.encoder(captions),
            "text_image_id": torch.tensor(owners, dtype=torch.long),
            "text_id": torch.tensor([text_id(caption) for caption in captions], dtype=torch.long),
        }
        return Collated(batch, seen, faults)

    def _no_images(self) -> torch.Tensor:
        return self.transform(Image.new("RGB", (32, 32)))[None][:0]


@dataclass
class TextCollate:
    """Batches of texts alone: ``input_ids``, ``attention_mask``, and ``text_index`` [T], the place in their list."""

    encoder: Encoder

    def __call__(self, texts: Sequence[tuple[int, str]]) -> Collated:
        """Encode pairs of a place and the text there."""
        batch = {
            **self.encoder([text for _, text in texts]),
            "text_index": torch.tensor([index for index, _ in texts]),
        }
        return Collated(batch, len(texts), [])
