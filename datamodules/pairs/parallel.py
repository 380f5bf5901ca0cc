"""Datamodule of parallel texts, for a new text tower, with pairs of images and texts for its evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from ...common.errors import UserError
from ...common.ranges import NOT_NEGATIVE
from ..base.contract import TokenizesForTeachers, asked_of
from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Outcome
from ..base.samples import Reader, TrainingSet, usable_samples
from ..base.stages import Split
from ..reading.layout import Layout
from ..reading.open import Opening, PairSources, open_split
from ..reading.remote import RETRIES
from ..reading.table import PairTable
from ..text.captions import text_id
from ..text.tokenizers import Encoder
from .datamodule import PairDataModule
from .source_arguments import SourceArguments
from .stored import StoredRows, open_stored


class ParallelTextDataModule(SourceArguments, PairDataModule):
    """Parallel texts for training, and images with captions for validation, test and prediction.

    A training row has a text as the trained pair of towers reads it, and the same text as the new tower reads it, such
    as its translation. Training files are `.parquet`, `.json` (a list of objects), `.jsonl` or `.csv`, also by URL, or
    sources of the hub. The other splits are those of `ImageTextDataModule`, with captions for the new tower.

    Args:
        old_column: column of the texts that the trained pair reads: each a string, or a list of strings, of which
            training draws one.
        new_column: column of the text that the new tower reads in their place.
        store: folder of a store of the training rows by the trained pair (`vlightning embed --of texts`): the features
            of the old texts are read from it, and the tower that is replaced does not run.
        image_column: column of the images of the other splits (encoded, or paths).
        caption_column: column of their captions, each a string or a list of strings.
        image_id_column: column whose equal values identify the same image; by default `image_id` if it exists, else
            the image's path.
        read_retries: number of times that a failed read of a file by URL is tried again.
    """

    default_image_size: ClassVar[int | None] = 256

    def __init__(
        self,
        *,
        old_column: str = "old",
        new_column: str = "new",
        image_column: str = "image",
        caption_column: str = "caption",
        image_id_column: str | None = None,
        store: str | None = None,
        read_retries: Annotated[int, NOT_NEGATIVE] = RETRIES,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._store_folder = store
        self._stored: StoredRows | None = None
        # The reader of pairs takes the new text as the path of an image, which is never opened.
        self._texts_opening = Opening(
            None, new_column, old_column, None, self.cache_dir, retries=read_retries, texts=True
        )
        columns = image_column, caption_column, image_id_column
        opening = Opening(self.image_root, *columns, self.cache_dir, retries=read_retries)
        self.pairs = PairSources(self.sources, opening, self.max_pixels)

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split, and convert their files."""
        return open_split(self._texts_opening, self.sources, split) if split == "train" else self.pairs.open(split)

    def open_split(self, split: Split) -> PairTable | None:
        """Open and check the rows of a split."""
        if split != "train":
            rows = self.pairs.rows(split, self.clean_captions, self.max_words)
            assert rows is None or isinstance(rows, PairTable)
            return rows
        if not (sources := self.open_sources("train")):
            return None
        table = ParallelTable(sources, self.max_pixels)
        table.check("train", True, self.clean_captions, self.max_words, need_images=False)
        return table

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and check that the module learns from parallel texts.

        Raises:
            UserError: If it does not, or a split cannot be used.
        """
        super().setup(stage)
        if stage == "fit" and self.trainer is not None and self._module() is None:
            raise UserError(
                "Expected a module that learns from parallel texts, such as NewTowerModule, with "
                f"ParallelTextDataModule, got {type(self.trainer.lightning_module).__name__}: give it "
                "ImageTextDataModule."
            )
        table = self.opened_rows("train")
        if stage == "fit" and self._store_folder is not None and table is not None:
            self._stored = open_stored(self._store_folder, "train", table, ["text"], True)

    @property
    def stored_teacher(self) -> dict[str, Any] | None:
        """Model and fingerprint of the text tower whose features stand in place of old texts; None without a store."""
        return None if self._stored is None else self._stored.record()

    def training_set(self, rows: Any) -> TrainingSet:
        """Return the dataset of parallel texts."""
        return TrainingSet(len(rows), self.training_reader(rows), self.run_seed)

    def training_reader(self, rows: Any) -> Reader:
        """Return a reader of a new text with one of its old texts."""
        return ParallelReader(rows, self.encoder(), self._stored)

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """Encode the new texts for the new tower, and the old ones for the tower that it replaces."""
        module = self._module()
        return ParallelCollate(self.encoder(), {} if module is None else module.teacher_tokenizers)

    def _module(self) -> TokenizesForTeachers | None:
        return asked_of(self.trainer, TokenizesForTeachers)  # type: ignore[type-abstract]


class ParallelTable(PairTable):
    """Rows of old texts, which are `captions`, and a new text."""

    def new_text(self, row: int) -> str:
        """Return the text that the new tower reads; raises `BadSample`."""
        value = self._value(row, self._layout(row).image)
        text = value.get("path") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise BadSample(EMPTY_CAPTION, self.name(row))
        return text

    def texts(self) -> Iterator[str]:
        """Yield all new texts of rows without a fault."""
        for row in range(len(self)):
            with contextlib.suppress(BadSample):
                yield self.new_text(row)


class ParallelSample(NamedTuple):
    """A row of parallel texts, its index, and the features [d] of the old text from a store, if there is one."""

    old: str
    new: str
    sample_index: int
    old_features: torch.Tensor | None


@dataclass
class ParallelReader:
    """Reader of a new text with one of its old texts.

    Args:
        rows: the rows.
        encoder: decides which texts are usable.
        stored: the store of the old texts.
    """

    rows: ParallelTable
    encoder: Encoder
    stored: StoredRows | None = None

    def __call__(self, row: int, numbers: tuple[int, int]) -> ParallelSample:
        """Read a row, and draw one of its old texts; arguments and errors as in `Reader`."""
        new = self.rows.new_text(row)
        usable = [text for text in self.rows.captions(row) if self.encoder.usable(text)]
        if not usable or not self.encoder.usable(new):
            raise BadSample(EMPTY_CAPTION, self.rows.name(row))
        old = usable[numbers[1] % len(usable)]
        features = None if self.stored is None else self.stored.texts(self.rows, [row], [old])[0]
        return ParallelSample(old, new, row, features)


@dataclass
class ParallelCollate:
    """Build training batches: `input_ids` and `attention_mask` of the new texts, and the ids of the old ones.

    From a store the batch has the features of the old texts instead, `teacher_features` [B, d]. `image_id` is equal for
    rows of the same old text, of which one is no negative of another.

    Args:
        encoder: encoder of the new texts.
        teachers: tokenizers of the towers that read the old texts, by the name of their ids in the batch.
    """

    encoder: Encoder
    teachers: Mapping[str, Callable[[list[str]], torch.Tensor]]

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, num_read, faults)
        old = [self.encoder.cleaned(sample.old, self.encoder.max_words) for sample in samples]
        batch: dict[str, torch.Tensor] = {
            **self.encoder([sample.new for sample in samples]),
            "image_id": torch.tensor([text_id(text.strip()) for text in old]),
            "sample_index": torch.tensor([sample.sample_index for sample in samples]),
        }
        stored = [sample.old_features for sample in samples if sample.old_features is not None]
        if stored:
            batch["teacher_features"] = torch.stack(stored)
        else:
            batch |= {name: tokenizer(old) for name, tokenizer in self.teachers.items()}
        return Collated(batch, num_read, faults)
