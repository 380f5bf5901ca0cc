"""Samples with features from a store in place of towers that run, and the checks that it is the store of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...common.errors import UserError
from ..base.faults import BadSample, Outcome
from ..base.samples import TrainingSet, Transform
from ..base.sampling import sample_numbers, seeded
from ..base.stages import Split
from ..reading.layout import probed_rows
from ..reading.table import PairTable
from ..stores.identity import row_key, texts_digest, transform_digest
from ..stores.store import FeatureStore, Side
from ..text.tokenizers import Encoder
from .rows import CaptionRows
from .samples import EvaluationSet, Sample, ShortTexts, drawn_captions

TOWERS: tuple[Side, ...] = ("image", "text")
TEXT_MISSING = "caption not in the store"
OTHER_IMAGE = "image not that of the store"


@dataclass(frozen=True)
class StoredRows:
    """The store of the rows of a split, and whose features are read from it.

    Args:
        store: the store.
        towers: the towers that do not run, "image" and "text".
    """

    store: FeatureStore
    towers: Sequence[Side]

    @property
    def widths(self) -> dict[str, int]:
        """Width of the features of each tower that does not run."""
        return {tower: self.store.width(tower) for tower in self.towers}

    def record(self) -> dict[str, Any]:
        """Return the model of the store, and the fingerprints of the towers that do not run."""
        model = self.store.manifest["model"]
        return {"model": model["name"], "towers": {tower: model[tower] for tower in self.towers}}

    def image(self, rows: PairTable | CaptionRows[PairTable], row: int, view: int = 0) -> torch.Tensor:
        """Return the features [D] of a view of the image of a row.

        Raises:
            BadSample: If the row cannot be used, or the store has another image.
        """
        name = rows.name(row)
        image_row = _image_row(rows, row)
        if (cause := self.store.fault(image_row)) is not None:
            raise BadSample(cause, name)
        path = rows.image_name(row)
        if path != name and row_key(path, None) != self.store.key(image_row):
            raise BadSample(OTHER_IMAGE, path)
        return self.store.image(image_row, view)

    def texts(
        self, rows: PairTable | CaptionRows[PairTable], among: Sequence[int], captions: Sequence[str]
    ) -> torch.Tensor:
        """Return the features [T, E] of captions of some rows.

        Raises:
            BadSample: If these rows have no such caption in the store.
        """
        features = []
        for caption in captions:
            stored = (self.store.text(_image_row(rows, row), caption) for row in among)
            if (feature := next((row for row in stored if row is not None), None)) is None:
                raise BadSample(TEXT_MISSING, rows.name(among[0]))
            features.append(feature)
        return torch.stack(features) if features else torch.zeros(0, self.store.width("text"))


def _image_row(rows: PairTable | CaptionRows[PairTable], row: int) -> int:
    return rows.image_row(row) if isinstance(rows, CaptionRows) else row


@dataclass
class StoredReader:
    """Reader of training samples with features from a store; random draws are those of `PairReader`.

    Args:
        rows: rows of the split.
        transform: image to [3, H, W], for an image tower that runs.
        encoder: decides which captions are usable.
        stored: the store of the rows.
        short_texts: as in `PairReader`.
    """

    rows: PairTable | CaptionRows[PairTable]
    transform: Transform
    encoder: Encoder
    stored: StoredRows
    short_texts: ShortTexts | None = None

    def __call__(self, row: int, numbers: tuple[int, int], view: int = 0) -> Sample:
        """Read a row.

        Args:
            row: index of the row.
            numbers: random numbers of the row, from `sample_numbers`.
            view: number of the view of the image.

        Raises:
            BadSample: If there is no usable caption or image, or the store has another.
        """
        captions = drawn_captions(self.rows, row, numbers[1], self.encoder, self.short_texts)
        if "image" in self.stored.towers:
            image = self.stored.image(self.rows, row, view)
        else:
            decoded = self.rows.image(row)
            with seeded(numbers[0]):
                image = self.transform(decoded)
        texts = self.stored.texts(self.rows, [row], captions) if "text" in self.stored.towers else None
        return Sample(image, captions, self.rows.image_id(row), row, texts)


@dataclass(eq=False)
class StoredSet(TrainingSet):
    """Training samples with features from a store: epoch e reads view e of an image, and begins anew after the last.

    A row that an epoch repeats, by the weight of its source, has the next view in each repetition.
    """

    read: StoredReader

    def sample(self, epoch: int, item: int) -> Sample:
        """Read the row of an item; raises `BadSample`."""
        repetition, row = divmod(item, self.length)
        return self.read(row, sample_numbers(self.seed, epoch, item), epoch + repetition)


@dataclass(eq=False)
class StoredEvaluationSet(EvaluationSet):
    """Images of an evaluation split with features from a store of plain views, each with all of its captions."""

    table: PairTable
    stored: StoredRows

    def __getitem__(self, image: int) -> Outcome:
        outcome = super().__getitem__(image)
        if outcome.sample is None or "text" not in self.stored.towers:
            return outcome
        try:
            texts = self.stored.texts(self.table, self.images[image], outcome.sample.captions)
        except BadSample as bad:
            return Outcome(None, outcome.num_read, [*outcome.faults, bad.fault])
        return Outcome(outcome.sample._replace(text_features=texts), outcome.num_read, outcome.faults)

    def load(self, row: int) -> Any:
        """Return the features [D] of a row's image, or the decoded image if the tower runs; raises `BadSample`."""
        return self.stored.image(self.table, row) if "image" in self.stored.towers else super().load(row)


def features_as_they_are(features: Any) -> torch.Tensor:
    """Return features [D], where a reader would transform an image."""
    stored: torch.Tensor = features
    return stored


# Checks of a store


def open_stored(folder: str, split: Split, table: PairTable, locked: Sequence[str] | None, fits: bool) -> StoredRows:
    """Open the store of the rows of a split.

    Args:
        folder: its folder.
        split: the split.
        table: the rows.
        locked: towers whose features stay the same in a training; None for a module without towers.
        fits: whether the module trains; otherwise all towers stay the same.

    Raises:
        UserError: If the store has other rows, no features that can be used, or augmented views for an evaluation.
    """
    store = FeatureStore(folder)
    if locked is None:
        raise UserError(
            f"Expected a module of two towers, such as CLIPModule, with the store {folder!r}, got another: leave out "
            "data.store."
        )
    stored = StoredRows(store, stored_towers(store, locked if fits else TOWERS))
    if split != "train" and store.views:
        raise UserError(
            f"Expected a store of plain views for data.{split}, got {store.views} augmented views of each image in "
            f"{folder!r}: embed the images without --views."
        )
    check_rows(store, split, table)
    return stored


def stored_towers(store: FeatureStore, locked: Sequence[str]) -> list[Side]:
    """Return the locked towers whose features a store has.

    Raises:
        UserError: If there is none.
    """
    kept = [tower for tower in TOWERS if store.sides[tower] is not None]
    towers = [tower for tower in kept if tower in locked]
    if not towers:
        options = " or ".join(f"model.tuning.lock_{tower} all" for tower in kept)
        what = f"the {' and '.join(locked)} tower" if locked else "none"
        raise UserError(
            f"Expected a locked tower whose features are in the store {str(store.folder)!r} ({', '.join(kept)}), got "
            f"{what} locked: set {options}, which CLIPModule has, or leave out data.store."
        )
    return towers


def check_rows(store: FeatureStore, split: Split, table: PairTable) -> None:
    """Check that the rows of a store are those of the data.

    Raises:
        UserError: If there are more or fewer, or other images.
    """
    where = f"the store {str(store.folder)!r}"
    if len(store) != len(table):
        raise UserError(
            f"Expected a store of the {len(table):,} rows of data.{split}, got {where} of {len(store):,}: embed these "
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
                f"Expected the rows of data.{split} in {where}, got another image in row {row} ({table.name(row)}): "
                "embed these rows, or give the sources of the store in their order."
            )


def check_preparation(stored: StoredRows, train: Any, plain: Any, encoder: Encoder) -> None:
    """Check that images and texts are prepared as they were for a store.

    Args:
        stored: the store, and the towers whose features are read.
        train: transform of training.
        plain: transform of evaluation.
        encoder: encoder of captions.

    Raises:
        UserError: If they are prepared in another way.
    """
    store = stored.store
    where = f"the store {str(store.folder)!r}"
    if "image" in stored.towers:
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

    if "text" in stored.towers and texts_digest(ids) != store.sides["text"]["tokenizer"]:
        raise UserError(
            f"Expected texts encoded as for {where}, got another tokenizer, length or cleaning: set data.tokenizer, "
            "data.max_tokens and data.clean_captions to the model's, or embed the data again."
        )
