"""Samples and batches of image-caption pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from PIL import Image

from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Fault, Outcome
from ..base.samples import Rows, SeededSet, Transform, empty_images, stacked, usable_samples
from ..base.sampling import sample_numbers, seeded
from ..text.captions import text_id
from ..text.tokenizers import Encoder

ShortTexts = Literal["sentence", "shortest"]
"""What of a row is its short text: the first sentence of the drawn caption, or the shortest of the captions."""


class TrainingRows(Protocol):
    """Rows of images and captions, as training reads them."""

    def image(self, row: int) -> Image.Image:
        """Return the decoded image (RGB); raises `BadSample`."""

    def captions(self, row: int) -> list[str]:
        """Return the raw captions; raises `BadSample`."""

    def image_id(self, row: int) -> int:
        """Return a number that is equal for rows of the same image; raises `BadSample`."""

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""


class PairRows(TrainingRows, Rows, Protocol):
    """Rows of images and captions."""

    def images(self) -> list[list[int]]:
        """Return the rows of each image, for evaluation."""

    def texts(self) -> Iterator[str]:
        """Yield all captions, to train a tokenizer on."""


class Sample(NamedTuple):
    """A usable image with its captions, of which features may stand in place of the pixels.

    Attributes:
        image: pixels [3, H, W], or features [D] from a store.
        captions: the captions; in training one, and with `short_texts` a short text after it.
        image_id: equal for rows of the same image.
        sample_index: index of the row.
        text_features: features [T, E] of the captions from a store; None without.
    """

    image: torch.Tensor
    captions: list[str]
    image_id: int
    sample_index: int
    text_features: torch.Tensor | None = None


@dataclass
class PairReader:
    """Reader of training samples: an augmented image with one of its captions.

    Args:
        rows: rows of the split.
        transform: image to float [3, H, W].
        encoder: decides which captions are usable.
        short_texts: what a sample has as its short text; None for none.
    """

    rows: TrainingRows
    transform: Transform
    encoder: Encoder
    short_texts: ShortTexts | None = None

    def __call__(self, row: int, numbers: tuple[int, int]) -> Sample:
        """Decode and augment the image of a row, and draw one of its captions; arguments and errors as in `Reader`."""
        captions = drawn_captions(self.rows, row, numbers[1], self.encoder, self.short_texts)
        image = self.rows.image(row)
        with seeded(numbers[0]):
            pixels = self.transform(image)
        return Sample(pixels, captions, self.rows.image_id(row), row)


def drawn_captions(
    rows: TrainingRows, row: int, number: int, encoder: Encoder, short_texts: ShortTexts | None = None
) -> list[str]:
    """Return one usable caption of a row, and after it the short text, if samples have one.

    Args:
        rows: rows of the split.
        row: index of the row.
        number: a random number, which draws the caption.
        encoder: decides which captions are usable.
        short_texts: "sentence": the short text is the first sentence of the drawn caption, as in Long-CLIP's training
            on ShareGPT4V (arXiv 2403.15378); "shortest": it is the shortest usable caption, and one of the others is
            drawn.

    Raises:
        BadSample: If the row has no usable caption.
    """
    usable = [caption for caption in rows.captions(row) if encoder.usable(caption)]
    if not usable:
        raise BadSample(EMPTY_CAPTION, rows.name(row))
    if short_texts == "shortest":
        short = min(usable, key=len)
        longer = list(usable)
        longer.remove(short)
        longer = longer or usable
        return [longer[number % len(longer)], short]
    drawn = usable[number % len(usable)]
    if short_texts is None:
        return [drawn]
    sentence = first_sentence(drawn)
    return [drawn, sentence if encoder.usable(sentence) else drawn]


def first_sentence(text: str) -> str:
    """Return the text up to the first period, question or exclamation mark before white space, or a line's end."""
    return re.split(r"(?<=[.!?])\s|\n", text.strip(), maxsplit=1)[0]


@dataclass(frozen=True)
class EvaluationReader:
    """Reader of images for evaluation, each with all of its captions.

    Args:
        transform: image to float [3, H, W], without randomness.
        encoder: decides which captions are usable.
        seed: the run's seed, so that a random transform has the same draws in each evaluation.
        need_captions: whether an image without captions counts as unusable.
    """

    transform: Transform
    encoder: Encoder
    seed: int
    need_captions: bool

    def __call__(self, load: Callable[[], Any], captions: list[str], name: str, image_id: int, index: int) -> Outcome:
        """Decode one image, and select its usable captions; each empty caption is counted as a fault."""
        usable = [caption for caption in captions if self.encoder.usable(caption)]
        faults = [Fault(EMPTY_CAPTION, name)] * (len(captions) - len(usable))
        if not captions and self.need_captions:
            faults = [Fault(EMPTY_CAPTION, name)]
        num_read = max(1, len(captions))
        if not usable and self.need_captions:
            return Outcome(None, num_read, faults)
        try:
            raw = load()
        except BadSample as bad:
            return Outcome(None, num_read, [*faults, bad.fault])
        with seeded(sample_numbers(self.seed, 0, index)[0]):
            image = self.transform(raw)
        return Outcome(Sample(image, usable, image_id, index), num_read, faults)


@dataclass(eq=False)
class EvaluationSet(SeededSet):
    """Images of an evaluation split, each with all of its captions; unusable images are skipped, never replaced."""

    table: PairRows
    images: Sequence[Sequence[int]]
    read: EvaluationReader

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
        name = self.table.name(rows[0])
        outcome = self.read(lambda: self.load(rows[0]), captions, name, image_id, rows[0])
        return Outcome(outcome.sample, outcome.num_read + len(faults), [*faults, *outcome.faults])

    def load(self, row: int) -> Any:
        """Return what the reader transforms: the decoded image of a row; raises `BadSample`."""
        return self.table.image(row)


def captions_of(table: PairRows, rows: Sequence[int]) -> tuple[list[str], list[Fault]]:
    """Return the raw captions of the rows of one image, and the faults of rows whose captions cannot be read."""
    captions: list[str] = []
    faults: list[Fault] = []
    for row in rows:
        try:
            captions += table.captions(row)
        except BadSample as bad:
            faults.append(bad.fault)
    return captions, faults


@dataclass
class TrainingCollate:
    """Build training batches: `image`, `input_ids`, `attention_mask`, `image_id` and `sample_index`.

    Args:
        encoder: encoder of captions.
        stored: width of the features that are read from a store, of `image` or `text`: `image_features` [B, D] then
            stand in place of `image`, `text_features` [B, E] beside `input_ids`.
        short_texts: whether samples have a short text after their caption: `short_input_ids` and
            `short_attention_mask`.
    """

    encoder: Encoder
    stored: Mapping[str, int] = field(default_factory=dict)
    short_texts: bool = False

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, num_read, faults)
        image = "image_features" if "image" in self.stored else "image"
        batch: dict[str, Any] = {
            image: stacked([sample.image for sample in samples]),
            **self.encoder([sample.captions[0] for sample in samples]),
            "image_id": torch.tensor([sample.image_id for sample in samples]),
            "sample_index": torch.tensor([sample.sample_index for sample in samples]),
            **_text_features(samples, self.stored),
        }
        if self.short_texts:
            short = self.encoder([sample.captions[1] for sample in samples])
            batch |= {f"short_{name}": value for name, value in short.items()}
        return Collated(batch, num_read, faults)


@dataclass
class EvaluationCollate:
    """Build evaluation batches: the images, and the concatenated captions of all images.

    `text_image_id` [T] is the id of the image of each caption; `text_id` [T] is equal for texts that are equal
    after the cleaning. `stored` is that of `TrainingCollate`; `text_features` are then [T, E].
    """

    encoder: Encoder
    transform: Transform
    stored: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        captions = [caption for sample in samples for caption in sample.captions]
        cleaned = [self.encoder.cleaned(caption, self.encoder.max_words) for caption in captions]
        text_image_ids = [sample.image_id for sample in samples for _ in sample.captions]
        width = self.stored.get("image")
        empty = empty_images(self.transform) if width is None else torch.zeros(0, width)
        batch: dict[str, Any] = {
            "image" if width is None else "image_features": (
                stacked([sample.image for sample in samples]) if samples else empty
            ),
            "image_id": torch.tensor([sample.image_id for sample in samples], dtype=torch.long),
            "sample_index": torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
            **self.encoder(captions),
            "text_image_id": torch.tensor(text_image_ids, dtype=torch.long),
            "text_id": torch.tensor([text_id(text.strip()) for text in cleaned], dtype=torch.long),
            **_text_features(samples, self.stored),
        }
        return Collated(batch, num_read, faults)


def _text_features(samples: Sequence[Sample], stored: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the features of the captions of samples from a store; empty if the text tower runs."""
    if "text" not in stored:
        return {}
    rows = [sample.text_features for sample in samples if sample.text_features is not None]
    return {"text_features": torch.cat(rows) if rows else torch.zeros(0, stored["text"])}
