"""Samples of reinforced pairs: one augmented image, two captions, and the teachers' embeddings of these three."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from PIL import Image

from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Fault, Outcome, reading
from ..base.samples import TrainingSet, stacked, usable_samples
from ..base.sampling import sample_numbers, view_seed
from ..reading.tar import caption_of, json_of
from ..text.captions import is_text, usable_caption
from ..text.tokenizers import Encoder
from ..transforms.replay import Augmentation, Box, augmentation_entries, parse_augmentation
from .rows import ReinforcedTable, SampleEmbeddings

REINFORCEMENTS = ("paug.json", "syn.json")
RESCALED = "box rescaled"
_RATIO_DRAW = 1
"""Number of the draw between real and synthetic caption, among those of `view_seed`."""


@dataclass(frozen=True)
class ReinforcedDraws:
    """Rules by which one augmentation and one synthetic caption are chosen; the defaults are the paper's.

    Args:
        first_augmentations: only the first this many augmentations are used; None means all.
        first_synthetic: only the first this many synthetic captions of each kind are used; None means all.
        sequential: whether epoch e uses augmentation and caption number e, modulo their counts, not random ones.
        synthetic_ratio: probability that a sample has its synthetic caption instead of the real one; None means that it
            has both.
    """

    first_augmentations: int | None = None
    first_synthetic: int | None = None
    sequential: bool = False
    synthetic_ratio: float | None = None

    def augmentation(self, count: int, numbers: tuple[int, int], epoch: int) -> int:
        """Return the index of one of `count` augmentations.

        Args:
            count: number of stored augmentations.
            numbers: random numbers of the sample, from `sample_numbers`.
            epoch: the epoch.
        """
        count = min(count, self.first_augmentations or count)
        return (epoch if self.sequential else numbers[0] >> 32) % count

    def synthetic(self, counts: Sequence[int], numbers: tuple[int, int], epoch: int) -> tuple[int, int]:
        """Return the kind and the index of one synthetic caption.

        Args:
            counts: number of captions of each kind.
            numbers: as in `augmentation`.
            epoch: as in `augmentation`.
        """
        used = [min(count, self.first_synthetic or count) for count in counts]
        if self.sequential:
            every = [(kind, index) for kind, count in enumerate(used) for index in range(count)]
            return every[epoch % len(every)]
        kind = (numbers[0] & 0xFFFFFFFF) % len(used)
        return kind, numbers[1] % used[kind]

    def captions(self, numbers: tuple[int, int]) -> tuple[bool, bool]:
        """Return whether a sample has its real caption, and whether it has a synthetic one."""
        if self.synthetic_ratio is None:
            return True, True
        synthetic = view_seed(numbers[0], _RATIO_DRAW) / 2**64 < self.synthetic_ratio
        return not synthetic, synthetic


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

    rows: ReinforcedTable
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
        captioner, index = self.draws.synthetic([len(group.captions) for group in groups], numbers, epoch)
        group = groups[captioner]
        has_real, has_synthetic = self.draws.captions(numbers)
        teacher_image = embeddings.row("image_emb", number)
        texts = [(captions[0], embeddings.row("text_emb", 0))] if has_real else []
        if has_synthetic:
            texts.append((group.captions[index], embeddings.row(group.array, group.offset + index)))
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
        captions_by_kind = json_of(members, "syn.json")
        if sum(f"{key}_emb" not in embeddings for key in captions_by_kind) > 1:
            raise BadSample("no embeddings for each kind of synthetic caption", name)
        for key, value in captions_by_kind.items():
            if not self.rows.synthetic_keys.fullmatch(key) or not isinstance(value, list):
                continue
            captions = [text for text in value if isinstance(text, str)]
            array = f"{key}_emb"  # version 2
            offset = 0
            has_rows = array in embeddings and embeddings.rows(array) >= len(captions)
            if array not in embeddings:  # version 1: after the embeddings of the real caption
                array = "text_emb"
                offset = embeddings.rows(array) - len(captions)
                has_rows = offset >= 1
            if len(captions) != len(value) or not has_rows:
                raise BadSample("no embedding for each synthetic caption", name)
            groups.append(_Synthetic(captions, array, offset))
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
    """Synthetic captions of one kind; their embeddings are rows `offset`, `offset + 1`, ... of `array`."""

    captions: list[str]
    array: str
    offset: int


def _size_in(record: dict[str, object]) -> tuple[int, int] | None:
    """Return the original height and width of the image in a record, or None if they are not recorded."""
    height = record.get("original_height")
    width = record.get("original_width")
    # `isinstance` would accept bool.
    return (height, width) if type(height) is int and type(width) is int else None


@dataclass
class ReinforcedCollate:
    """Build training batches with a second caption and the teachers' embeddings.

    In addition to `image`, `input_ids`, `attention_mask`, `image_id` and `sample_index`, a batch holds the
    synthetic caption as `synthetic_input_ids` and `synthetic_attention_mask`, and the concatenated embeddings of
    all teachers as `teacher_image`, `teacher_text` and `teacher_synthetic` [B, D]. With a `synthetic_ratio` it
    has one caption of each sample, without a synthetic one beside it.

    Args:
        encoder: encoder of the captions.
        dtype: data type of the embeddings.
    """

    encoder: Encoder
    dtype: torch.dtype

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images and the embeddings, and encode the captions."""
        samples: list[ReinforcedSample]
        samples, read, faults = usable_samples(outcomes)
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, read, faults)
        second = [sample.synthetic for sample in samples if sample.synthetic is not None]
        texts = self.encoder([*(sample.caption for sample in samples), *second])
        index = torch.tensor([sample.sample_index for sample in samples])
        batch: dict[str, Any] = {"image": stacked([sample.image for sample in samples])}
        batch |= {key: ids[: len(samples)] for key, ids in texts.items()}
        embeddings = ["teacher_image", "teacher_text"]
        if second:
            batch |= {f"synthetic_{key}": ids[len(samples) :] for key, ids in texts.items()}
            embeddings.append("teacher_synthetic")
        for key in embeddings:
            batch[key] = stacked([getattr(sample, key).to(self.dtype) for sample in samples])
        batch["image_id"] = index
        batch["sample_index"] = index.clone()
        return Collated(batch, read, faults, [note for sample in samples for note in sample.notes])


class ReinforcedSet(TrainingSet):
    """Training samples whose reader also takes the epoch."""

    read: ReinforcedReader

    def sample(self, epoch: int, item: int) -> ReinforcedSample:
        """As in `TrainingSet`."""
        return self.read(item, sample_numbers(self.seed, epoch, item), epoch)
