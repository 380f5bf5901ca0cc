"""The datamodule over embeddings of images and the captions of these images: nothing is decoded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from .core.base import ImageDataModule, Split, splits_of
from .core.decode import EMPTY_CAPTION, MAX_PIXELS, BadSample, Fault
from .core.samples import Collated, Outcome, account, captions_of
from .image_text import PairSources, Sources, by_split
from .sources.embeddings import Embeddings, JoinOn
from .sources.open import Opening
from .sources.table import PairTable
from .text.tokenizers import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_EMBEDDING = "no embedding"


class EmbeddedImages(PairTable):
    """Rows of images and captions whose images were embedded before.

    Args:
        parts: the sources, opened.
        embeddings: of the images.
    """

    def __init__(self, parts: Sequence[tuple[Any, Any]], embeddings: Embeddings) -> None:
        super().__init__(parts, MAX_PIXELS)
        self.embeddings = embeddings

    def embedding(self, row: int) -> torch.Tensor:
        """Float32 [D].

        Raises:
            BadSample: the image was not embedded, or to numbers that are not finite; or the row has a fault.
        """
        key = self._key(row)
        if key not in self.embeddings:
            raise BadSample(NO_EMBEDDING, str(key))
        embedding = self.embeddings[key]
        if not embedding.isfinite().all():
            raise BadSample("non-finite embedding", str(key))
        return embedding

    def _key(self, row: int) -> str | int:
        return self.picture_name(row) if self.embeddings.join_on == "image" else self.image_id(row)

    def check_embedded(self, split: str, need_captions: bool) -> None:
        """Fail where the split is empty, or where nothing in it can be used.

        Raises:
            ValueError: naming what was found.
        """

        def unusable(row: int) -> Fault | None:
            try:
                if need_captions and not any(map(_usable, self.captions(row))):
                    return Fault(EMPTY_CAPTION, self.name(row))
                self.embedding(row)
            except BadSample as bad:
                return bad.fault
            return None

        wanted = (
            f"images with captions whose {self.embeddings.join_on} is in {str(self.embeddings.paths[0])!r}: embed "
            "these images, correct data.image_root, or set data.join_on"
        )
        self.check_rows(split, wanted, unusable)


class CaptionRows:
    """The captions of embedded images, one a row; one too for an image whose captions cannot be read.

    Args:
        images: with the captions.
    """

    def __init__(self, images: EmbeddedImages) -> None:
        self.images = images
        self._ends = list(accumulate(self._count(row) for row in range(len(images))))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _count(self, image: int) -> int:
        try:
            return len(self.images.captions(image))
        except BadSample:
            return 1

    def image_row(self, row: int) -> int:
        """The row of the image that a caption belongs to."""
        return bisect_right(self._ends, row)

    def caption(self, row: int) -> str:
        """The raw caption; raises :class:`BadSample`."""
        image = self.image_row(row)
        return self.images.captions(image)[row - self._ends[image]]  # counted from the end

    def image(self, row: int) -> Image.Image:
        """The decoded image, where it is still there; raises :class:`BadSample`."""
        return self.images.image(self.image_row(row))

    def picture_name(self, row: int) -> str:
        """The path of the image where it is a file, else source and row."""
        return self.images.picture_name(self.image_row(row))


class EmbeddedCaption(NamedTuple):
    """An embedding with the captions that go with it."""

    embedding: torch.Tensor
    captions: list[str]
    image_id: int
    sample_index: int


@dataclass
class CaptionReader:
    """Reads a row as one caption with its image's embedding; there is nothing to draw."""

    rows: CaptionRows

    def __call__(self, row: int, words: tuple[int, int]) -> EmbeddedCaption:
        """Read a row; raises :class:`BadSample`."""
        images, image = self.rows.images, self.rows.image_row(row)
        caption = self.rows.caption(row)
        if not _usable(caption):
            raise BadSample(EMPTY_CAPTION, images.name(image))
        return EmbeddedCaption(images.embedding(image), [caption], images.image_id(image), row)


class EmbeddedEvaluationSet(Dataset[Outcome]):
    """Images of an evaluation split with all their captions; unusable ones are left out, never replaced.

    Args:
        rows: the rows.
        images: the rows of each image.
        need_captions: whether an image without captions counts as unusable.
    """

    def __init__(self, rows: EmbeddedImages, images: Sequence[Sequence[int]], need_captions: bool) -> None:
        self.rows = rows
        self.images = images
        self.need_captions = need_captions

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, image: int) -> Outcome:
        rows, table = self.images[image], self.rows
        captions, faults = captions_of(table, rows)
        seen = max(1, len(captions) + len(faults))
        if len(faults) == len(rows):
            return Outcome(None, seen, faults)
        usable = [" ".join(caption.split()) for caption in captions if _usable(caption)]
        faults += [Fault(EMPTY_CAPTION, table.name(rows[0]))] * (len(captions) - len(usable))
        if self.need_captions and not usable:
            return Outcome(None, seen, faults or [Fault(EMPTY_CAPTION, table.name(rows[0]))])
        try:
            embedding, image_id = table.embedding(rows[0]), table.image_id(rows[0])
        except BadSample as bad:
            return Outcome(None, seen, [*faults, bad.fault])
        return Outcome(EmbeddedCaption(embedding, usable, image_id, rows[0]), seen, faults)


@dataclass
class EmbeddedCollate:
    """Batches of ``embedding``, ``image_id`` and ``sample_index``, with ``references`` in evaluation.

    Args:
        width: of the embeddings.
    """

    width: int

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the embeddings; ``references`` is a list of texts for each image."""
        samples, seen, faults = account(outcomes)
        batch = self.stacked(samples)
        batch["references"] = [sample.captions for sample in samples]
        return Collated(batch, seen, faults)

    def stacked(self, samples: Sequence[EmbeddedCaption]) -> dict[str, Any]:
        """What all batches have."""
        return {
            "embedding": torch.stack([s.embedding for s in samples]) if samples else torch.zeros(0, self.width),
            "image_id": torch.tensor([sample.image_id for sample in samples], dtype=torch.long),
            "sample_index": torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
        }


@dataclass
class CaptionCollate(EmbeddedCollate):
    """Training batches: those, and ``input_ids`` and ``attention_mask``, long [B, L].

    A caption is followed by the tokenizer's end of text, which the mask counts in; what fills up a row is hidden by the
    mask alone. A caption that is too long is cut, and its end is not shown.

    Args:
        width: of the embeddings.
        tokenizer: of the language model.
        max_tokens: longest caption, its end included.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the embeddings and encode the captions."""
        samples, seen, faults = account(outcomes)
        if len(samples) < len(outcomes):  # no substitute found either: the loader ends the run
            return Collated(None, seen, faults)
        texts = [" ".join(sample.captions[0].split()) for sample in samples]
        end = self.tokenizer.eos_token_id
        rows = [
            torch.tensor([*ids, end][: self.max_tokens])
            for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=end)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return Collated(self.stacked(samples) | {"input_ids": ids, "attention_mask": mask}, seen, faults)


class EmbeddedCaptionsDataModule(ImageDataModule):
    """Embeddings of images, as ``predict`` of an ``ImageEmbeddingModule`` writes them, with the images' captions.

    Order and exact resume are those of :class:`ImageDataModule`. In training each caption is a row, as in ClipCap. In
    evaluation and prediction each image comes once; an evaluation batch holds ``references``, all captions of each
    image as a list of lists of texts. The images themselves are not read and need not be there.

    Args:
        embeddings: a Parquet file, glob pattern or folder, or a list of these.
        train: images with captions for training, in the forms that ``ImageTextDataModule`` takes, such as Karpathy's
            ``dataset_coco.json``, of which each argument takes its own split.
        validation: images with captions for validation, in the same forms.
        test: images with captions for testing, in the same forms.
        predict: images to caption; captions may be missing.
        join_on: what finds an image's embedding: "image", its path (its source and row, where the data holds the
            image), or "image_id", for images that have moved since.
        image_root: folder that relative image paths start from; by default that of the file which names them.
        image_column: column of the images.
        caption_column: column of the captions, each a string or a list of strings.
        image_id_column: column whose equal values mean the same image; by default ``image_id`` where there is one,
            else the image's path.
        language_model: GPT-2's hub name or folder, whose tokenizer is used. The module takes it over.
        max_tokens: longest caption, its end included; longer ones are cut.
        batch_size: captions per process and training batch (MM-LG: 256 in all).
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process; there is little for them to do.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of the order; by default Lightning's global seed, or 0 without one. The value in a checkpoint wins
            when a run is resumed.
        max_bad_share: largest share of unusable samples (no embedding, empty caption), of those read so far, with which
            a run goes on.
        cache_dir: where the ``datasets`` library keeps its memory-mapped copies.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        embeddings: str | list[str],
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
        max_tokens: int = 67,
        batch_size: int = 256,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        max_bad_share: float = 0.05,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=nn.Identity(),
            eval_transform=nn.Identity(),
            max_bad_share=max_bad_share,
        )
        if max_tokens < 2:
            raise ValueError(f"found max_tokens={max_tokens}, expected at least 2: raise it")
        self.max_tokens = max_tokens
        self.language_model = language_model
        self.join_on = join_on
        self._files = [embeddings] if isinstance(embeddings, str) else list(embeddings)
        self.pairs = PairSources(
            by_split(train, validation, test, predict),
            Opening(image_root, image_column, caption_column, image_id_column, cache_dir),
            MAX_PIXELS,
        )
        self._record_hyperparameters()

    def prepare_data(self) -> None:
        """Convert the files once per node, so that the other processes find the memory-mapped copies."""
        for split in splits_of(self.trainer.state.fn if self.trainer is not None else None):
            self.pairs.open(split)

    def open_split(self, split: Split) -> CaptionRows | EmbeddedImages | None:
        """The rows of a split, checked."""
        parts = self.pairs.open(split)
        if not parts:
            return None
        images = EmbeddedImages(parts, self.embeddings)
        images.check_embedded(split, split != "predict")
        return CaptionRows(images) if split == "train" else images

    def training_reader(self, rows: CaptionRows) -> CaptionReader:
        """Reads an embedding with one caption."""
        return CaptionReader(rows)

    def training_collate(self) -> CaptionCollate:
        """Stacks embeddings and encodes captions."""
        return CaptionCollate(self.embeddings.width, self.tokenizer, self.max_tokens)

    @property
    def preprocessing(self) -> None:
        """No images are read."""
        return None

    def evaluation_items(self, rows: EmbeddedImages) -> list[list[int]]:
        """The rows of each image."""
        return rows.images()

    def evaluation_set(self, rows: EmbeddedImages, items: list[list[int]], split: Split) -> EmbeddedEvaluationSet:
        """Images with all their captions."""
        return EmbeddedEvaluationSet(rows, items, split != "predict")

    def evaluation_collate(self) -> EmbeddedCollate:
        """Stacks embeddings."""
        return EmbeddedCollate(self.embeddings.width)

    @cached_property
    def embeddings(self) -> Embeddings:
        """All of them, in main memory."""
        return Embeddings(self._files, self.join_on)

    @property
    def tower(self) -> dict[str, str] | None:
        """What made the embeddings, None where their file does not say."""
        return self.embeddings.origin

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The language model's.

        Raises:
            ValueError: there is none, or it has no end of text.
        """
        tokenizer = open_tokenizer(self.language_model)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"found no end of text in the tokenizer of {self.language_model!r}, expected one, as GPT-2's has: give "
                "another language model"
            )
        return tokenizer


def _usable(caption: object) -> bool:
    return isinstance(caption, str) and bool(caption.strip())
