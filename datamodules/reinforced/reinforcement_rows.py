"""Samples for teachers to embed: pairs with drawn augmentations, and samples that are read back from shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from ...common.preprocessing import Interpolation
from ..base.decode import decode_image, image_suffix
from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Fault, Outcome
from ..base.samples import SeededSet, stacked, usable_samples
from ..base.sampling import sample_numbers, seeded, view_seed
from ..reading.shards import Shards
from ..reading.table import PairTable
from ..reading.tar import caption_of, json_of
from ..text.captions import usable_caption
from ..transforms.replay import Augmentation, AugmentationDraw, augmentation_entries, parse_augmentation, replay
from .rows import SampleEmbeddings
from .writer import ReinforcedRecord

SYNTHETIC_KEY = "syn_text"
"""Key of the synthetic captions in `syn.json`."""
NO_SYNTHETIC = "no synthetic caption"
FURTHER_CAPTIONS = "further captions of a row skipped"


class View(NamedTuple):
    """Input size of a teacher in pixels, and the interpolation of its crop."""

    size: int
    interpolation: Interpolation


class Original(NamedTuple):
    """An image-caption pair, and the augmentations that were drawn for the image."""

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
        """Return the sample to write.

        Args:
            synthetic: synthetic captions.
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
            synthetic={SYNTHETIC_KEY: synthetic},
            augmentations=self.augmentations,
            size=self.size,
            image_embeddings=image,
            text_embeddings=text,
            synthetic_embeddings={SYNTHETIC_KEY: synthetic_text},
            uid=uid,
            sha256=content.hexdigest(),
        )


class PreparedPair(NamedTuple):
    """A pair with the inputs of the networks: uint8 [A, S, S, 3] for each view; for the captioner float [3, H, W].

    Of several captioners, `caption_image` is the list of their inputs.
    """

    original: Original
    views: list[torch.Tensor]
    caption_image: torch.Tensor | list[torch.Tensor] | None
    caption_seed: int
    notes: Sequence[Fault] = ()


class Originals:
    """Pairs and unusable rows of a batch.

    This class is not a collection, so that Lightning does not move its content to a device.

    Attributes:
        pairs: the usable pairs.
        faults: index and fault of each unusable row.
    """

    def __init__(self, pairs: list[Original], faults: list[tuple[int, Fault]]) -> None:
        self.pairs = pairs
        self.faults = faults


@dataclass
class NetworkInputs:
    """Prepare the inputs of the teachers and of the captioner.

    Args:
        views: input size and interpolation of the teachers.
        caption_transform: transform of the captioner's input, the image without augmentation; None without a captioner.
    """

    views: Sequence[View]
    caption_transform: Callable[[Image.Image], torch.Tensor | list[torch.Tensor]] | None

    def __call__(self, image: Image.Image, original: Original, seed: int) -> PreparedPair:
        """Apply all augmentations of a pair to its decoded image.

        Args:
            image: the decoded image.
            original: the pair.
            seed: seed of the captioner.
        """
        views = [
            torch.stack([_pixels(replay(image, one, *view)) for one in original.augmentations]) for view in self.views
        ]
        caption_image = None if self.caption_transform is None else self.caption_transform(image)
        return PreparedPair(original, views, caption_image, seed)


def _pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


class ReinforcementSet(SeededSet):
    """Pairs with augmentations that are a function of (seed, row, index of the augmentation).

    Args:
        rows: rows of the pairs.
        synthetic: the same rows with synthetic captions as captions; None if a captioner generates the captions.
        inputs: prepares the inputs of the networks.
        draw: draws an augmentation.
        augmentations: number of augmentations of each image.
        seed: seed of the draws.
    """

    def __init__(
        self,
        rows: PairTable,
        synthetic: PairTable | None,
        inputs: NetworkInputs,
        draw: AugmentationDraw,
        augmentations: int,
        seed: int,
    ) -> None:
        self.rows = rows
        self.synthetic = synthetic
        self.inputs = inputs
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
        # Readers of shards do not apply the EXIF orientation either.
        image = decode_image(encoded, None, name, self.rows.max_pixels, upright=False)
        seed, caption_seed = sample_numbers(self.seed, 0, row)
        augmentations = []
        for number in range(self.augmentations):
            with seeded(view_seed(seed, number)):
                augmentations.append(self.draw(image.height, image.width))
        size = image.height, image.width
        original = Original(row, name, encoded, captions[0], synthetic, augmentations, size)
        prepared = self.inputs(image, original, caption_seed)
        return Outcome(prepared._replace(notes=[Fault(FURTHER_CAPTIONS, name)] if len(captions) > 1 else []), 1)


class ReinforcementCollate:
    """Build batches for a module that embeds augmentations.

    A batch holds `views`, a list of uint8 [N, A, S, S, 3]; `caption_images`, float [N, 3, H, W], or a list of these for
    several captioners, if there is one; `caption_seed`, long [N]; `sample_index`, long [N], the rows; and
    `originals`, the pairs.
    """

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images."""
        _, read, faults = usable_samples(outcomes)
        prepared = [outcome.sample for outcome in outcomes if isinstance(outcome.sample, PreparedPair)]
        bad = [
            (outcome.sample, outcome.faults[0]) for outcome in outcomes if not isinstance(outcome.sample, PreparedPair)
        ]
        notes = [note for one in prepared for note in one.notes]
        return Collated(batch_of(prepared, bad), read, faults, notes)


def batch_of(prepared: Sequence[PreparedPair], faults: list[tuple[int, Fault]]) -> dict[str, Any]:
    """Return a batch of usable pairs and of the faults of unusable rows; it may be empty."""
    batch: dict[str, Any] = {
        "views": [stacked(list(images)) for images in zip(*(one.views for one in prepared), strict=True)],
        "caption_seed": torch.tensor([one.caption_seed for one in prepared], dtype=torch.long),
        "sample_index": torch.tensor([one.original.row for one in prepared], dtype=torch.long),
        "originals": Originals([one.original for one in prepared], faults),
    }
    images = [one.caption_image for one in prepared if one.caption_image is not None]
    return batch | ({"caption_images": default_collate(images)} if images else {})


class StoredSample(NamedTuple):
    """A sample of a finished shard: the pair, and its stored embeddings.

    Attributes:
        prepared: the pair, with its augmentations applied again.
        image: embeddings [A, D] of the augmentations.
        text: embeddings [1 + S, D] of the caption and the synthetic captions.
        name: shard and key, for messages.
    """

    prepared: PreparedPair
    image: torch.Tensor
    text: torch.Tensor
    name: str


def read_back(shards: Shards, sample: int, inputs: NetworkInputs) -> StoredSample:
    """Read a sample of a finished shard with all of its embeddings.

    Raises:
        BadSample: If the sample cannot be read.
    """
    name = shards.name(sample)
    members = shards.members(sample)
    embeddings = SampleEmbeddings(members, name)
    suffix = next(iter(members))
    image = decode_image(members[suffix], None, name, max_pixels=2**62, upright=False)
    entries = augmentation_entries(json_of(members, "paug.json").get("param_aug"))
    synthetic: Any = json_of(members, "syn.json").get(SYNTHETIC_KEY, [])
    original = Original(
        int(shards.key(sample)),
        name,
        members[suffix],
        caption_of(members)[0],
        list(synthetic),
        [parse_augmentation(entry) for entry in entries],
        (image.height, image.width),
    )
    arrays = ("text_emb", f"{SYNTHETIC_KEY}_emb")
    text = [_all_rows(embeddings, array) for array in arrays if array in embeddings]
    return StoredSample(inputs(image, original, 0), _all_rows(embeddings, "image_emb"), torch.cat(text), name)


def _all_rows(embeddings: SampleEmbeddings, array: str) -> torch.Tensor:
    return torch.stack([embeddings.row(array, number).float() for number in range(embeddings.rows(array))])
