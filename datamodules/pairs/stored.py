"""Training samples with features of locked towers from a store, and the checks that it is the store of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...common.errors import UserError
from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Outcome
from ..base.samples import TrainingSet, Transform, stacked, usable_samples
from ..base.sampling import sample_numbers, seeded
from ..reading.layout import probed_rows
from ..reading.table import PairTable
from ..stores.identity import row_key, texts_digest, transform_digest
from ..stores.store import FeatureStore
from ..text.tokenizers import Encoder
from .rows import CaptionRows

TEXT_MISSING = "caption not in the store"
OTHER_IMAGE = "image not that of the store"


class StoredSample(NamedTuple):
    """An image with one of its captions, of which features may stand in place of the pixels.

    Attributes:
        image: pixels [3, H, W], or features [D] by the locked tower.
        text: features [E] of the caption; None if the text tower runs.
        caption: the caption.
        image_id: equal for rows of the same image.
        sample_index: index of the row.
    """

    image: torch.Tensor
    text: torch.Tensor | None
    caption: str
    image_id: int
    sample_index: int


@dataclass
class StoredReader:
    """Reader of training samples with features from a store; random draws are those of `PairReader`.

    Args:
        rows: rows of the split.
        transform: image to [3, H, W], for an image tower that runs.
        encoder: decides which captions are usable.
        store: the store of the rows.
        towers: locked towers, "image" and "text", whose features are read.
    """

    rows: PairTable | CaptionRows[PairTable]
    transform: Transform
    encoder: Encoder
    store: FeatureStore
    towers: Sequence[str]

    def __call__(self, row: int, numbers: tuple[int, int], view: int = 0) -> StoredSample:
        """Read a row.

        Args:
            row: index of the row.
            numbers: random numbers of the row, from `sample_numbers`.
            view: number of the view of the image.

        Raises:
            BadSample: If there is no usable caption or image, or the store has another.
        """
        usable = [caption for caption in self.rows.captions(row) if self.encoder.usable(caption)]
        if not usable:
            raise BadSample(EMPTY_CAPTION, self.rows.name(row))
        caption = usable[numbers[1] % len(usable)]
        image_row = self.rows.image_row(row) if isinstance(self.rows, CaptionRows) else row
        if "image" in self.towers:
            image = self._stored_image(row, image_row, view)
        else:
            decoded = self.rows.image(row)
            with seeded(numbers[0]):
                image = self.transform(decoded)
        text = None
        if "text" in self.towers and (text := self.store.text(image_row, caption)) is None:
            raise BadSample(TEXT_MISSING, self.rows.name(row))
        return StoredSample(image, text, caption, self.rows.image_id(row), row)

    def _stored_image(self, row: int, image_row: int, view: int) -> torch.Tensor:
        name = self.rows.name(row)
        if (cause := self.store.fault(image_row)) is not None:
            raise BadSample(cause, name)
        path = self.rows.image_name(row)
        if path != name and row_key(path, None) != self.store.key(image_row):
            raise BadSample(OTHER_IMAGE, path)
        return self.store.image(image_row, view)


@dataclass(eq=False)
class StoredSet(TrainingSet):
    """Training samples with features from a store: epoch e reads view e of an image, and begins anew after the last.

    A row that an epoch repeats, by the weight of its source, has the next view in each repetition.
    """

    read: StoredReader

    def sample(self, epoch: int, item: int) -> StoredSample:
        """Read the row of an item; raises `BadSample`."""
        repetition, row = divmod(item, self.length)
        return self.read(row, sample_numbers(self.seed, epoch, item), epoch + repetition)


@dataclass
class StoredCollate:
    """Build training batches as `TrainingCollate` does, with `image_features` [B, D] or `text_features` [B, E].

    The former stand in place of `image`, the latter beside `input_ids`.
    """

    encoder: Encoder
    towers: Sequence[str]

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack images and features, and encode the captions."""
        samples, num_read, faults = usable_samples(outcomes)
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, num_read, faults)
        image = "image_features" if "image" in self.towers else "image"
        batch: dict[str, Any] = {
            image: stacked([sample.image for sample in samples]),
            **self.encoder([sample.caption for sample in samples]),
            "image_id": torch.tensor([sample.image_id for sample in samples]),
            "sample_index": torch.tensor([sample.sample_index for sample in samples]),
        }
        if "text" in self.towers:
            batch["text_features"] = stacked([sample.text for sample in samples if sample.text is not None])
        return Collated(batch, num_read, faults)


def stored_towers(store: FeatureStore, locked: Sequence[str]) -> list[str]:
    """Return the locked towers whose features a store has.

    Raises:
        UserError: If there is none.
    """
    kept = [tower for tower in ("image", "text") if store.sides[tower] is not None]
    towers = [tower for tower in locked if tower in kept]
    if not towers:
        options = " or ".join(f"model.tuning.lock_{tower} all" for tower in kept)
        what = f"the {' and '.join(locked)} tower" if locked else "none"
        raise UserError(
            f"Expected a locked tower whose features are in the store {str(store.folder)!r} ({', '.join(kept)}), got "
            f"{what} locked: set {options}, or leave out data.store."
        )
    return towers


def check_rows(store: FeatureStore, table: PairTable) -> None:
    """Check that the rows of a store are those of the data.

    Raises:
        UserError: If there are more or fewer, or other images.
    """
    where = f"the store {str(store.folder)!r}"
    if len(store) != len(table):
        raise UserError(
            f"Expected a store of the {len(table):,} rows of data.train, got {where} of {len(store):,}: embed these "
            "rows, or give the sources of the store."
        )
    for row in probed_rows(len(table)):
        try:
            image = table.stored_image(row)
        except BadSample:
            continue
        key = row_key(image.path, image.data)
        if (stored := store.key(row)) is not None and stored != key:
            raise UserError(
                f"Expected the rows of data.train in {where}, got another image in row {row} ({table.name(row)}): "
                "embed these rows, or give the sources of the store in their order."
            )


def check_preparation(store: FeatureStore, towers: Sequence[str], train: Any, plain: Any, encoder: Encoder) -> None:
    """Check that images and texts are prepared as they were for a store.

    Args:
        store: the store.
        towers: the towers whose features are read.
        train: transform of training.
        plain: transform of evaluation.
        encoder: encoder of captions.

    Raises:
        UserError: If they are prepared in another way.
    """
    where = f"the store {str(store.folder)!r}"
    if "image" in towers:
        wanted = store.sides["image"]["preprocessing"]
        transform = train if store.views else plain
        if transform_digest(transform, bool(store.views)) != wanted:
            kind = "augmented as for" if store.views else "prepared as for the plain views of"
            raise UserError(
                f"Expected images {kind} {where}, got another "
                f"{'training' if store.views else 'evaluation'} transform: set data.image_size, the augmentation and "
                "the model's weights as they were, or embed the data again."
            )

    def ids(texts: Sequence[str]) -> torch.Tensor:
        return encoder(texts)["input_ids"]

    if "text" in towers and texts_digest(ids) != store.sides["text"]["tokenizer"]:
        raise UserError(
            f"Expected texts encoded as for {where}, got another tokenizer, length or cleaning: set data.tokenizer, "
            "data.max_tokens and data.clean_captions to the model's, or embed the data again."
        )
