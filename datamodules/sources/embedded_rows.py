"""Captions of images with precomputed embeddings: rows, samples and batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from ..core.decode import MAX_PIXELS
from ..core.faults import EMPTY_CAPTION, BadSample, Collated, Fault, Outcome
from ..core.pair_samples import captions_of
from ..core.samples import account
from .embeddings import Embeddings
from .table import PairTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_EMBEDDING = "no embedding"


class EmbeddedImages(PairTable):
    """Rows of captions and precomputed embeddings of their images.

    Args:
        parts: the sources, opened.
        embeddings: embeddings of the images.
    """

    def __init__(self, parts: Sequence[tuple[Any, Any]], embeddings: Embeddings) -> None:
        super().__init__(parts, MAX_PIXELS)
        self.embeddings = embeddings

    def embedding(self, row: int) -> torch.Tensor:
        """Return the embedding of a row's image, float32 [D].

        Raises:
            BadSample: there is no embedding, or it is non-finite; or the row has a fault.
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
        """Check that the split is not empty, and that a row in it can be used.

        Raises:
            UserError: it is empty, or no row can be used.
        """

        def unusable(row: int) -> Fault | None:
            try:
                if need_captions and not any(map(_usable, self.captions(row))):
                    return Fault(EMPTY_CAPTION, self.name(row))
                self.embedding(row)
            except BadSample as bad:
                return bad.fault
            return None

        wanted = f"images with captions whose {self.embeddings.join_on} is in {str(self.embeddings.paths[0])!r}"
        self.check_rows(split, wanted, "embed these images, correct data.image_root, or set data.join_on", unusable)


class CaptionRows:
    """The captions of embedded images, one per row; an image whose captions cannot be read has one row, too.

    Args:
        images: rows of images with their captions.
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
        """Return the row of a caption's image."""
        return bisect_right(self._ends, row)

    def caption(self, row: int) -> str:
        """Return the raw caption; raises :class:`BadSample`."""
        image = self.image_row(row)
        return self.images.captions(image)[row - self._ends[image]]  # counted from the end

    def image(self, row: int) -> Image.Image:
        """Return the decoded image; raises :class:`BadSample`, for example if the file is missing."""
        return self.images.image(self.image_row(row))

    def image_name(self, row: int) -> str:
        """Return the path of the image where it is a file, else its source and row."""
        return self.images.image_name(self.image_row(row))


class EmbeddedCaption(NamedTuple):
    """An embedding with its captions."""

    embedding: torch.Tensor
    captions: list[str]
    image_id: int
    sample_index: int


@dataclass
class CaptionReader:
    """Read a row as one caption with its image's embedding, without random draws."""

    rows: CaptionRows

    def __call__(self, row: int, words: tuple[int, int]) -> EmbeddedCaption:
        """Read a row; raises :class:`BadSample`."""
        images, image = self.rows.images, self.rows.image_row(row)
        caption = self.rows.caption(row)
        if not _usable(caption):
            raise BadSample(EMPTY_CAPTION, images.name(image))
        return EmbeddedCaption(images.embedding(image), [caption], images.image_id(image), row)


class EmbeddedEvaluationSet(Dataset[Outcome]):
    """Images of an evaluation split with all of their captions; unusable ones are skipped, never replaced.

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
    """Build evaluation batches: ``embedding``, ``image_id``, ``sample_index``, and the captions as ``references``.

    Args:
        width: the embedding dimension.
    """

    width: int

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the embeddings; ``references`` is a list of texts for each image."""
        samples, seen, faults = account(outcomes)
        batch = self.stacked(samples)
        batch["references"] = [sample.captions for sample in samples]
        return Collated(batch, seen, faults)

    def stacked(self, samples: Sequence[EmbeddedCaption]) -> dict[str, Any]:
        """Return the entries of all batches."""
        return {
            "embedding": torch.stack([s.embedding for s in samples]) if samples else torch.zeros(0, self.width),
            "image_id": torch.tensor([sample.image_id for sample in samples], dtype=torch.long),
            "sample_index": torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
        }


@dataclass
class CaptionCollate(EmbeddedCollate):
    """Build training batches: ``embedding``, ``image_id``, ``sample_index``, ``input_ids``, ``attention_mask`` [B, L].

    A caption is followed by the tokenizer's end-of-text token, which the mask includes; padding uses the same token and
    is masked. A caption that is too long is truncated, without an end-of-text token.

    Args:
        width: the embedding dimension.
        tokenizer: the tokenizer of the language model.
        max_tokens: longest caption, end-of-text token included.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the embeddings and encode the captions."""
        samples, seen, faults = account(outcomes)
        if len(samples) < len(outcomes):  # a sample without a usable substitute: the loader ends the run
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


def _usable(caption: object) -> bool:
    return isinstance(caption, str) and bool(caption.strip())
