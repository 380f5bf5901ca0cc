"""Datamodule of precomputed image embeddings with the captions of the images."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from ...common.errors import UserError
from ...common.ranges import Range
from ...common.tokenizers import open_tokenizer
from ..base.decode import MAX_PIXELS
from ..base.sampled import SampledDataModule
from ..base.stages import Split
from ..reading.division import DividedSources
from ..reading.layout import Layout
from ..reading.open import Opening, PairSources
from ..reading.resolve import Sources, by_split
from ..stores.store import FeatureStore
from .embedded_rows import (
    CaptionCollate,
    CaptionReader,
    EmbeddedCollate,
    EmbeddedEvaluationSet,
    EmbeddedImages,
    ImageEmbeddings,
    JoinOn,
)
from .rows import CaptionRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class EmbeddedCaptionsDataModule(DividedSources, SampledDataModule):
    """Image embeddings in a store, as `vlightning embed` writes it, with the images' captions.

    In training each caption is a row, as in ClipCap. Evaluation and prediction read each image once; an evaluation
    batch holds `references`, the list of all captions of each image. The image files are not read and may be missing.

    Args:
        embeddings: folder of the store, with plain views of the images.
        train: images with captions for training, in the forms that `ImageTextDataModule` reads, such as Karpathy's
            `dataset_coco.json`, of which each argument reads its own split.
        validation: images with captions for validation, in the same forms.
        test: images with captions for testing, in the same forms.
        predict: images to caption; captions are optional.
        join_on: key by which embeddings are looked up: "image", the path of the image (source and row if the data
            contains the image), or "image_id", for images that have been moved.
        image_root: folder that relative image paths start from; by default the folder of the file that names them.
        image_column: column of the images.
        caption_column: column of the captions, each a string or a list of strings.
        image_id_column: column whose equal values identify the same image; by default `image_id` if it exists, else
            the image's path.
        language_model: hub name or folder of the language model (GPT-2) whose tokenizer is used; linked to the module.
        max_tokens: longest caption, end-of-text token included; longer captions are truncated.
        batch_size: captions per process and training batch (MM-LG: 256 in all).
        num_workers: loader workers per process; 0 suffices, since no images are decoded.
        cache_dir: folder for the memory-mapped copies of the `datasets` library.

    Raises:
        UserError: If an option is out of its range.
    """

    def __init__(
        self,
        embeddings: str,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        join_on: JoinOn = "image",
        image_root: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        image_id_column: str | None = None,
        language_model: str = "gpt2",
        max_tokens: Annotated[int, Range(least=2)] = 67,
        batch_size: int = 256,
        num_workers: int = 0,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, **options)
        self.max_tokens = max_tokens
        self.language_model = language_model
        self.join_on = join_on
        self._store = embeddings
        self.pairs = PairSources(
            self.divided(by_split(train, validation, test, predict)),
            Opening(image_root, image_column, caption_column, image_id_column, cache_dir),
            MAX_PIXELS,
            division=self.division,
        )

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        return self.pairs.open(split)

    def open_split(self, split: Split) -> CaptionRows[EmbeddedImages] | EmbeddedImages | None:
        """Open and check the rows of a split."""
        sources = self.open_sources(split)
        if not sources:
            return None
        images = EmbeddedImages(sources, self.embeddings)
        images.check_embedded(split, split != "predict")
        return CaptionRows(images) if split == "train" else images

    def training_reader(self, rows: CaptionRows[EmbeddedImages]) -> CaptionReader:
        """Return a reader of an embedding with one caption."""
        return CaptionReader(rows)

    def training_collate(self) -> CaptionCollate:
        """Stack the embeddings and encode the captions."""
        return CaptionCollate(self.embeddings.width, self.tokenizer, self.max_tokens)

    def evaluation_items(self, rows: EmbeddedImages) -> list[list[int]]:
        """Return the rows of each image."""
        return rows.images()

    def evaluation_set(self, rows: EmbeddedImages, items: list[list[int]], split: Split) -> EmbeddedEvaluationSet:
        """Return a dataset of images with all of their captions."""
        return EmbeddedEvaluationSet(rows, items, split != "predict")

    def evaluation_collate(self, split: Split) -> EmbeddedCollate:
        """Stack the embeddings."""
        return EmbeddedCollate(self.embeddings.width)

    @cached_property
    def embeddings(self) -> ImageEmbeddings:
        """All embeddings, in mapped files."""
        return ImageEmbeddings(FeatureStore(self._store), self.join_on)

    @property
    def tower(self) -> dict[str, str]:
        """Network that computed the embeddings."""
        return self.embeddings.origin

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the language model.

        Raises:
            UserError: If the tokenizer does not exist, or has no end-of-text token.
        """
        tokenizer = open_tokenizer(self.language_model)
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"Expected a tokenizer with an end-of-text token, such as GPT-2's, got that of {self.language_model!r} "
                "without one: set data.language_model to another model."
            )
        return tokenizer
