"""Rows, samples and batches of captions and precomputed image embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from ...common.errors import UserError
from ..base.decode import MAX_PIXELS
from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Fault, Outcome
from ..base.samples import usable_samples
from ..reading.table import PairTable
from ..stores.store import FeatureStore
from .rows import CaptionRows
from .samples import captions_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JoinOn = Literal["image", "image_id"]


class ImageEmbeddings:
    """Features of the plain views of a store, indexed by the name or the id of the image.

    Rows of the same image have the same features, of which the first are read.

    Args:
        store: the store.
        join_on: the key by which embeddings are looked up.

    Raises:
        UserError: If the store has no images, augmented views of them, or normalized features.
    """

    def __init__(self, store: FeatureStore, join_on: JoinOn) -> None:
        images = store.sides["image"]
        if images is None or store.views:
            what = "texts only" if images is None else f"{store.views} augmented views of each image"
            raise UserError(
                f"Expected a store with plain views of images as data.embeddings, got {str(store.folder)!r} with "
                f"{what}: embed the images without --views."
            )
        if images.get("normalized"):
            raise UserError(
                f"Expected a store of `vlightning embed` as data.embeddings, got {str(store.folder)!r} with normalized "
                "embeddings, as the demo and the evaluation keep them: embed the images."
            )
        self.store = store
        self.join_on = join_on
        keys = store.names() if join_on == "image" else store.image_ids()
        usable = store.usable()
        self._rows: dict[str | int, int] = {}
        for row, key in enumerate(keys):
            if key is not None and usable[row]:
                self._rows.setdefault(key, row)

    @property
    def origin(self) -> dict[str, str]:
        """Name of the model, source of its weights, and their sha256."""
        model = self.store.manifest["model"]
        return {
            "model": model["name"],
            "weights": str(model["weights"] or model["name"]),  # none where the model of a config was embedded
            "sha256": model["sha256"],
        }

    @property
    def width(self) -> int:
        """The embedding dimension D."""
        return self.store.width("image")

    def __contains__(self, key: str | int) -> bool:
        return key in self._rows

    def __getitem__(self, key: str | int) -> torch.Tensor:
        """Return an embedding, float32 [D]."""
        return self.store.image(self._rows[key])


NO_EMBEDDING = "no embedding"


class EmbeddedImages(PairTable):
    """Rows of captions and precomputed embeddings of their images."""

    def __init__(self, sources: Sequence[tuple[Any, Any]], embeddings: ImageEmbeddings) -> None:
        super().__init__(sources, MAX_PIXELS)
        self.embeddings = embeddings

    def embedding(self, row: int) -> torch.Tensor:
        """Return the embedding of a row's image, float32 [D].

        Raises:
            BadSample: If the image has no embedding or a non-finite one, or the row has a fault.
        """
        key = self._key(row)
        if key not in self.embeddings:
            raise BadSample(NO_EMBEDDING, str(key))
        embedding = self.embeddings[key]
        if not embedding.isfinite().all():
            raise BadSample("non-finite embedding", str(key))
        return embedding

    def _key(self, row: int) -> str | int:
        return self.image_name(row) if self.embeddings.join_on == "image" else self.image_id(row)

    def check_embedded(self, split: str, need_captions: bool) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """

        def read(row: int) -> None:
            if need_captions and not any(map(_usable, self.captions(row))):
                raise BadSample(EMPTY_CAPTION, self.name(row))
            self.embedding(row)

        expected = f"images with captions whose {self.embeddings.join_on} is in {str(self.embeddings.store.folder)!r}"
        self.check_rows(split, expected, "embed these images, correct data.image_root, or set data.join_on", read)


class EmbeddedCaption(NamedTuple):
    """Embedding of an image with the captions of the image."""

    embedding: torch.Tensor
    captions: list[str]
    image_id: int
    sample_index: int


@dataclass
class CaptionReader:
    """Reader of training samples: one caption with the embedding of its image, without random draws."""

    rows: CaptionRows[EmbeddedImages]

    def __call__(self, row: int, numbers: tuple[int, int]) -> EmbeddedCaption:
        """Read a row.

        Raises:
            BadSample: If the caption is empty, or the row cannot be used.
        """
        images = self.rows.table
        image = self.rows.image_row(row)
        caption = self.rows.caption(row)
        if not _usable(caption):
            raise BadSample(EMPTY_CAPTION, images.name(image))
        return EmbeddedCaption(images.embedding(image), [caption], images.image_id(image), row)


@dataclass(eq=False)
class EmbeddedEvaluationSet(Dataset[Outcome]):
    """Images of an evaluation split with all of their captions; unusable images are skipped, never replaced."""

    rows: EmbeddedImages
    images: Sequence[Sequence[int]]
    need_captions: bool

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, image: int) -> Outcome:
        rows = self.images[image]
        table = self.rows
        captions, faults = captions_of(table, rows)
        num_read = max(1, len(captions) + len(faults))
        if len(faults) == len(rows):
            return Outcome(None, num_read, faults)
        usable = [" ".join(caption.split()) for caption in captions if _usable(caption)]
        faults += [Fault(EMPTY_CAPTION, table.name(rows[0]))] * (len(captions) - len(usable))
        if self.need_captions and not usable:
            return Outcome(None, num_read, faults or [Fault(EMPTY_CAPTION, table.name(rows[0]))])
        try:
            embedding = table.embedding(rows[0])
            image_id = table.image_id(rows[0])
        except BadSample as bad:
            return Outcome(None, num_read, [*faults, bad.fault])
        return Outcome(EmbeddedCaption(embedding, usable, image_id, rows[0]), num_read, faults)


@dataclass
class EmbeddedCollate:
    """Build evaluation batches: `embedding` [B, D], `image_id` [B], `sample_index` [B] and `references`."""

    width: int

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        batch = self.stacked(samples)
        batch["references"] = [sample.captions for sample in samples]
        return Collated(batch, num_read, faults)

    def stacked(self, samples: Sequence[EmbeddedCaption]) -> dict[str, Any]:
        """Return the entries that training and evaluation batches share."""
        return {
            "embedding": torch.stack([s.embedding for s in samples]) if samples else torch.zeros(0, self.width),
            "image_id": torch.tensor([sample.image_id for sample in samples], dtype=torch.long),
            "sample_index": torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
        }


@dataclass
class CaptionCollate(EmbeddedCollate):
    """Build training batches: `embedding`, `image_id`, `sample_index`, `input_ids`, `attention_mask` [B, L].

    A caption is followed by the tokenizer's end-of-text token, which the mask includes; padding uses the same token and
    is masked out. A caption that is too long is truncated, without an end-of-text token.

    Args:
        width: the embedding dimension.
        tokenizer: the tokenizer of the language model.
        max_tokens: longest caption, end-of-text token included.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, num_read, faults)
        texts = [" ".join(sample.captions[0].split()) for sample in samples]
        end = self.tokenizer.eos_token_id
        rows = [
            torch.tensor([*ids, end][: self.max_tokens])
            for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=end)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return Collated(self.stacked(samples) | {"input_ids": ids, "attention_mask": mask}, num_read, faults)


def _usable(caption: object) -> bool:
    return isinstance(caption, str) and bool(caption.strip())
