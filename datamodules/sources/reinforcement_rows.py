"""Rows of pairs on their way to a teacher: augmentations drawn, images decoded and cropped; and back from shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..core.decode import EMPTY_CAPTION, BadSample, Fault, decode_image, image_suffix
from ..core.samples import Collated, Outcome, SeededSet, account, stacked
from ..core.sampling import sample_words, seeded, view_seed
from ..text.tokenizers import usable_caption
from ..transforms.replay import (
    Augmentation,
    AugmentationDraw,
    Interpolation,
    augmentation_entries,
    parse_augmentation,
    replay,
)
from .reinforced_rows import Embeddings, caption_of
from .reinforced_writer import ReinforcedRecord
from .table import PairTable
from .tar import Shards, json_of

KIND = "syn_text"
"""The entry of synthetic captions in `syn.json`."""
NO_SYNTHETIC = "no synthetic caption"
FURTHER = "further captions of a row left out"


class View(NamedTuple):
    """How a teacher wants an augmented image: side in pixels, and interpolation of the crop."""

    size: int
    interpolation: Interpolation


class Original(NamedTuple):
    """A pair as it came, and the augmentations that were drawn for it."""

    row: int
    name: str
    image: bytes
    caption: str
    synthetic: list[str]
    augmentations: list[Augmentation]
    size: tuple[int, int]

    def reinforced(
        self, synthetic: Sequence[str], image: torch.Tensor, text: torch.Tensor, synthetic_text: torch.Tensor
    ) -> ReinforcedRecord:
        """The sample to keep.

        Args:
            synthetic: captions.
            image: embeddings [A, D] of the augmentations.
            text: embedding [1, D] of the caption.
            synthetic_text: embeddings [S, D] of the synthetic captions.
        """
        content = hashlib.sha256(self.image)
        uid = hashlib.blake2b(content.digest() + self.caption.encode(), digest_size=16).hexdigest()
        return ReinforcedRecord(
            key=f"{self.row:010d}",
            image=self.image,
            suffix=image_suffix(self.image),
            caption=self.caption,
            synthetic={KIND: synthetic},
            augmentations=self.augmentations,
            size=self.size,
            image_embeddings=image,
            text_embeddings=text,
            synthetic_embeddings={KIND: synthetic_text},
            uid=uid,
            sha256=content.hexdigest(),
        )


class Looked(NamedTuple):
    """A pair with its images: for each view uint8 [A, S, S, 3]; for the captioner float [3, H, W], or None."""

    original: Original
    views: list[torch.Tensor]
    whole: torch.Tensor | None
    caption_seed: int
    notes: Sequence[Fault] = ()


class Originals:
    """The pairs of a batch, and the rows that gave none; no collection, so that moving a batch leaves it alone.

    Attributes:
        pairs: the usable ones.
        faults: row and cause of the others.
    """

    def __init__(self, pairs: list[Original], faults: list[tuple[int, Fault]]) -> None:
        self.pairs = pairs
        self.faults = faults


@dataclass
class Looks:
    """What the module wants to see.

    Args:
        views: of the augmented images.
        whole: what makes the captioner's input of an image; None where nobody captions.
    """

    views: Sequence[View]
    whole: Callable[[Image.Image], torch.Tensor] | None

    def __call__(self, image: Image.Image, original: Original, seed: int) -> Looked:
        """Carry all augmentations out."""
        views = [
            torch.stack([_pixels(replay(image, one, *view)) for one in original.augmentations]) for view in self.views
        ]
        return Looked(original, views, self.whole(image) if self.whole is not None else None, seed)


def _pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


class ReinforcementSet(SeededSet):
    """Pairs with freshly drawn augmentations, a function of (seed, row, number of the augmentation).

    Args:
        rows: the pairs.
        synthetic: the same rows with synthetic captions for captions; None where a captioner makes them.
        looks: what to make of an image.
        draw: draws an augmentation.
        augmentations: number of augmentations of each image.
        seed: seed of the draws.
    """

    def __init__(
        self,
        rows: PairTable,
        synthetic: PairTable | None,
        looks: Looks,
        draw: AugmentationDraw,
        augmentations: int,
        seed: int,
    ) -> None:
        self.rows = rows
        self.synthetic = synthetic
        self.looks = looks
        self.draw = draw
        self.augmentations = augmentations
        self.seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Outcome:
        try:
            return self._read(row)
        except BadSample as bad:
            return Outcome(row, 1, [bad.fault])

    def _read(self, row: int) -> Outcome:
        name = self.rows.name(row)
        captions = [caption for caption in self.rows.captions(row) if usable_caption(caption, False, 0)]
        if not captions:
            raise BadSample(EMPTY_CAPTION, name)
        synthetic: list[str] = []
        if self.synthetic is not None:
            synthetic = [text for text in self.synthetic.captions(row) if usable_caption(text, False, 0)]
            if not synthetic:
                raise BadSample(NO_SYNTHETIC, name)
        encoded = self.rows.encoded(row)
        # As it is stored: readers of shards do not turn images either.
        image = decode_image(encoded, None, name, self.rows.max_pixels, upright=False)
        seed, caption_seed = sample_words(self.seed, 0, row)
        augmentations = []
        for number in range(self.augmentations):
            with seeded(view_seed(seed, number)):
                augmentations.append(self.draw(image.height, image.width))
        size = image.height, image.width
        original = Original(row, name, encoded, captions[0], synthetic, augmentations, size)
        looked = self.looks(image, original, caption_seed)
        return Outcome(looked._replace(notes=[Fault(FURTHER, name)] if len(captions) > 1 else []), 1)


class ReinforcementCollate:
    """Batches for a module that embeds pairs.

    ``views``: for each view of the module uint8 [N, A, S, S, 3]. ``whole``: float [N, 3, H, W] for the captioner, where
    there is one. ``caption_seed``: long [N]. ``sample_index``: long [N], the rows. ``originals``: the pairs.
    """

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images."""
        _, seen, faults = account(outcomes)
        looked = [outcome.sample for outcome in outcomes if isinstance(outcome.sample, Looked)]
        bad = [(outcome.sample, outcome.faults[0]) for outcome in outcomes if not isinstance(outcome.sample, Looked)]
        notes = [note for one in looked for note in one.notes]
        return Collated(batch_of(looked, bad), seen, faults, notes)


def batch_of(looked: Sequence[Looked], faults: list[tuple[int, Fault]]) -> dict[str, Any]:
    """A batch, of no pairs too."""
    batch: dict[str, Any] = {
        "views": [stacked(list(images)) for images in zip(*(one.views for one in looked), strict=True)],
        "caption_seed": torch.tensor([one.caption_seed for one in looked], dtype=torch.long),
        "sample_index": torch.tensor([one.original.row for one in looked], dtype=torch.long),
        "originals": Originals([one.original for one in looked], faults),
    }
    whole = [one.whole for one in looked if one.whole is not None]
    return batch | ({"whole": stacked(whole)} if whole else {})


class Written(NamedTuple):
    """A sample of a finished shard: the pair, and the embeddings that stand there.

    Attributes:
        looked: the pair, its augmentations carried out again.
        image: [A, D].
        text: [1 + S, D], of the caption and the synthetic ones.
        place: shard and key.
    """

    looked: Looked
    image: torch.Tensor
    text: torch.Tensor
    place: str


def read_back(shards: Shards, sample: int, looks: Looks) -> Written:
    """Read a written sample with all of its embeddings.

    Raises:
        BadSample: it cannot be read.
    """
    place = shards.name(sample)
    members = shards.members(sample)
    embeddings = Embeddings(members, place)
    suffix = next(iter(members))
    image = decode_image(members[suffix], None, place, max_pixels=2**62, upright=False)
    entries = augmentation_entries(json_of(members, "paug.json").get("param_aug"))
    synthetic: Any = json_of(members, "syn.json").get(KIND, [])
    original = Original(
        int(shards.key(sample)),
        place,
        members[suffix],
        caption_of(members)[0],
        list(synthetic),
        [parse_augmentation(entry) for entry in entries],
        (image.height, image.width),
    )
    own = f"{KIND}_emb"
    text = [_all_rows(embeddings, array) for array in ("text_emb", own) if array in embeddings]
    return Written(looks(image, original, 0), _all_rows(embeddings, "image_emb"), torch.cat(text), place)


def _all_rows(embeddings: Embeddings, array: str) -> torch.Tensor:
    return torch.stack([embeddings.row(array, number).float() for number in range(embeddings.rows(array))])
