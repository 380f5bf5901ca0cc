"""Reader of reinforced samples: one augmented image, two captions, and the teachers' embeddings of these three."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from PIL import Image

from ..base.faults import EMPTY_CAPTION, BadSample, Fault, reading
from ..reading.tar import caption_of, json_of
from ..text.captions import is_text, usable_caption
from ..transforms.replay import Augmentation, Box, augmentation_entries, parse_augmentation
from .draws import ReinforcedDraws
from .sample_embeddings import SampleEmbeddings

REINFORCEMENTS = ("paug.json", "syn.json")
RESCALED = "box rescaled"

OtherSizes = Literal["rescale", "refuse", "ignore"]


class ReinforcedRows(Protocol):
    """Rows of reinforced samples, as `ReinforcedReader` reads them."""

    synthetic_keys: re.Pattern[str]
    other_sizes: OtherSizes
    teacher_width: int

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""

    def members(self, row: int) -> dict[str, bytes]:
        """Return the members of a row by kind.

        Raises:
            BadSample: If the row cannot be read.
        """

    def decoded(self, members: dict[str, bytes], row: int) -> Image.Image:
        """Decode the image in the members of a row, without applying the EXIF orientation.

        Raises:
            BadSample: If the image cannot be used.
        """


class ReinforcedSample(NamedTuple):
    """An augmented image with its captions, and the teachers' embeddings [D] of each.

    With a `synthetic_ratio`, the caption is real or synthetic, and there is no other: `synthetic` and
    `teacher_synthetic` are None.
    """

    image: torch.Tensor
    caption: str
    synthetic: str | None
    teacher_image: torch.Tensor
    teacher_text: torch.Tensor
    teacher_synthetic: torch.Tensor | None
    sample_index: int
    notes: list[Fault]


@dataclass
class ReinforcedReader:
    """Reader of training samples: one of the recorded augmentations, the caption, and one of the synthetic captions.

    Args:
        rows: rows of the split.
        transform: replays an augmentation.
        draws: chooses the augmentation and the captions.
    """

    rows: ReinforcedRows
    transform: Callable[[Image.Image, Augmentation], torch.Tensor]
    draws: ReinforcedDraws = field(default_factory=ReinforcedDraws)

    def __call__(self, row: int, numbers: tuple[int, int], epoch: int = 0) -> ReinforcedSample:
        """Read a row.

        Args:
            row: index of the row.
            numbers: random numbers of the row, from `sample_numbers`.
            epoch: the epoch, for sequential draws.

        Raises:
            BadSample: If the row cannot be used.
        """
        name = self.rows.name(row)
        with reading(name):  # includes the transform, which replays an augmentation that the row contains
            return self._read(row, numbers, epoch, name)

    def _read(self, row: int, numbers: tuple[int, int], epoch: int, name: str) -> ReinforcedSample:
        members = self.rows.members(row)
        captions = [caption for caption in caption_of(members) if usable_caption(caption, False, 0)]
        if not captions:
            raise BadSample(EMPTY_CAPTION, name)
        for required in REINFORCEMENTS:
            if required not in members:
                raise BadSample(f"no member {required}", name)
        embeddings = SampleEmbeddings(members, name)
        record = json_of(members, "paug.json")
        entries = self._entries(record, embeddings, name)
        groups = self._synthetic(members, embeddings, name)
        number = self.draws.augmentation(len(entries), numbers, epoch)
        captioner, place = self.draws.synthetic([len(group.captions) for group in groups], numbers, epoch)
        group = groups[captioner]
        has_real, has_synthetic = self.draws.captions(numbers)
        teacher_image = embeddings.row("image_emb", number)
        texts = [(captions[0], embeddings.row("text_emb", 0))] if has_real else []
        if has_synthetic:
            texts.append((group.captions[place], embeddings.row(group.array, group.first + place)))
        if not is_text(texts[-1][0]):
            raise BadSample("lone surrogate in the caption", name)
        self._check_rows([teacher_image, *(embedding for _, embedding in texts)], name)
        image = self.rows.decoded(members, row)
        augmentation, notes = self._rescaled_augmentation(entries, number, record, image, members, name)
        caption, teacher_text = texts[0]
        synthetic, teacher_synthetic = texts[1] if len(texts) > 1 else (None, None)
        return ReinforcedSample(
            self.transform(image, augmentation),
            caption,
            synthetic,
            teacher_image,
            teacher_text,
            teacher_synthetic,
            row,
            notes,
        )

    def _entries(self, record: dict[str, object], embeddings: SampleEmbeddings, name: str) -> list[Any]:
        try:
            entries = augmentation_entries(record.get("param_aug"))
        except (ValueError, RecursionError):
            raise BadSample("unreadable paug.json", name) from None
        if len(entries) != embeddings.rows("image_emb"):
            raise BadSample("param_aug and image_emb differ in number", name)
        return entries

    def _synthetic(self, members: dict[str, bytes], embeddings: SampleEmbeddings, name: str) -> list[_Synthetic]:
        groups = []
        kinds = json_of(members, "syn.json")
        if sum(f"{key}_emb" not in embeddings for key in kinds) > 1:
            raise BadSample("no embeddings for each kind of synthetic caption", name)
        for key, value in kinds.items():
            if not self.rows.synthetic_keys.fullmatch(key) or not isinstance(value, list):
                continue
            captions = [text for text in value if isinstance(text, str)]
            own = f"{key}_emb"  # version 2
            array, first = (own, 0) if own in embeddings else ("text_emb", embeddings.rows("text_emb") - len(captions))
            if len(captions) != len(value) or embeddings.rows(array) < len(captions) or (array != own and first < 1):
                raise BadSample("no embedding for each synthetic caption", name)
            groups.append(_Synthetic(captions, array, first))
        groups = [group for group in groups if group.captions]
        if not groups:
            raise BadSample("no synthetic caption", name)
        return groups

    def _check_rows(self, rows: list[torch.Tensor], name: str) -> None:
        width = self.rows.teacher_width or len(rows[0])
        for row in rows:
            if len(row) != width:
                raise BadSample(f"embedding of dimension {len(row)} instead of {width}", name)
            if not row.isfinite().all():
                raise BadSample("non-finite embedding", name)

    def _rescaled_augmentation(
        self,
        entries: list[Any],
        number: int,
        record: dict[str, object],
        image: Image.Image,
        members: dict[str, bytes],
        name: str,
    ) -> tuple[Augmentation, list[Fault]]:
        """Return the augmentation with its box in pixels of the image, and a note if the box was rescaled."""
        actual = (image.height, image.width)
        try:
            chosen = parse_augmentation(entries[number])
            boxes = [Box(*box) for box, _ in entries]
            fit = all(box.fits(*actual) for box in boxes)
        except (TypeError, ValueError, RecursionError):
            raise BadSample("unreadable paug.json", name) from None
        recorded = None
        if self.rows.other_sizes != "ignore":
            # With "ignore", the downloader may have recorded the size before it resized the image.
            records = (record, json_of(members, "image.json"), json_of(members, "json"))
            recorded = next((size for size in map(_size_in, records) if size is not None), None)
        if recorded is not None and min(recorded) < 1:
            raise BadSample("original size not positive", name)
        if recorded is None or recorded == actual:
            if not fit:
                raise BadSample("box outside the image", name)
            return chosen, []
        if self.rows.other_sizes == "refuse":
            raise BadSample("image size differs from recorded", name)
        return chosen._replace(box=chosen.box.rescaled(recorded, actual)), [Fault(RESCALED, name)]


class _Synthetic(NamedTuple):
    """Synthetic captions of one kind; their embeddings are rows `first`, `first + 1`, ... of `array`."""

    captions: list[str]
    array: str
    first: int


def _size_in(record: dict[str, object]) -> tuple[int, int] | None:
    """Return the original height and width of the image in a record, or None if they are not recorded."""
    height, width = record.get("original_height"), record.get("original_width")
    # `isinstance` would accept bool.
    return (height, width) if type(height) is int and type(width) is int else None
