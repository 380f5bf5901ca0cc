"""Rows of reinforced shards: an image and its captions, with the teachers' embeddings.

The layout is that of DataCompDR: the members `txt` (the caption), `syn.json` (synthetic captions), `paug.json`
(augmentations) and `npz` or `pth.gz` (embeddings), in version 1 with one `text_emb` for real and synthetic
captions, in version 2 with one array for each kind of synthetic caption.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ...common.errors import UserError
from ..base.decode import decode_image, read_image
from ..base.faults import BadSample
from ..reading.layout import PROBED_ROWS
from ..reading.tar import IMAGE_SUFFIXES, caption_of, uid_of
from .reader import OtherSizes, ReinforcedReader

if TYPE_CHECKING:
    from ..reading.shards import SeparateImages, Shards


class ReinforcedTable:
    """The samples of reinforced shards.

    Args:
        shards: the tar files.
        separate_images: images outside of the shards; None if the shards contain the images.
        synthetic_keys: regular expression; synthetic captions are used if it matches their whole key.
        other_sizes: treatment of images whose size differs from the recorded size.
        max_pixels: images with more pixels are refused.
    """

    def __init__(
        self,
        shards: Shards,
        separate_images: SeparateImages | None,
        synthetic_keys: str,
        other_sizes: OtherSizes,
        max_pixels: int,
    ) -> None:
        self.shards = shards
        self.separate_images = separate_images
        self.synthetic_keys = re.compile(synthetic_keys)
        self.other_sizes: OtherSizes = other_sizes
        self.max_pixels = max_pixels
        self.teacher_width = 0

    def __len__(self) -> int:
        return len(self.shards)

    def name(self, row: int) -> str:
        """Return shard and key of a row, its name in messages."""
        return self.shards.name(row)

    def image_name(self, row: int) -> str:
        """Return the name of the row, since the image is not a file of its own."""
        return self.name(row)

    def members(self, row: int) -> dict[str, bytes]:
        """Return the members of a row and those of its separate image, whose `json` is returned as `image.json`.

        Raises:
            BadSample: If the members cannot be read.
        """
        members = self.shards.members(row)
        if self.separate_images is not None:
            found = self.separate_images.members(row, self.shards.key(row).rpartition("/")[2], uid_of(members))
            members |= {("image.json" if kind == "json" else kind): content for kind, content in found.items()}
        return members

    def image(self, row: int) -> Image.Image:
        """Return the decoded image."""
        return self.decoded(self.members(row), row)

    def decoded(self, members: dict[str, bytes], row: int) -> Image.Image:
        """Decode the image in the members of a row, without EXIF orientation, since boxes are measured without it.

        Raises:
            BadSample: If there is no image, or it cannot be used.
        """
        return decode_image(_image_in(members), None, self.name(row), self.max_pixels, upright=False)

    def encoded(self, row: int) -> bytes:
        """Return the encoded image; raises `BadSample`."""
        return read_image(_image_in(self.members(row)), None, self.name(row))

    def captions(self, row: int) -> list[str]:
        """Return the real caption in a list, which is empty without one; raises `BadSample`."""
        return caption_of(self.members(row))

    def check(self, split: str, read: ReinforcedReader) -> None:
        """Check that at least one of the probed samples can be used, and set `teacher_width` from it.

        Raises:
            UserError: If the split is empty, or no probed sample can be used.
        """
        origins = f"{len(self.shards.files)} shard(s), {self.shards.files[0]!r} the first"
        if not len(self):
            raise UserError(f"Expected samples in the {split} split ({origins}), got none: check the path.")
        causes: dict[str, int] = {}
        example = ""
        for row in np.unique(np.linspace(0, len(self) - 1, PROBED_ROWS).astype(int)).tolist():
            try:
                self.teacher_width = len(read(row, (0, 0)).teacher_image)
            except BadSample as bad:
                causes[bad.fault.cause] = causes.get(bad.fault.cause, 0) + 1
                example = example or bad.fault.name
                continue
            return
        what = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
        hint = "" if self.separate_images is not None else ", or set data.images if the images are not in the shards"
        raise UserError(
            f"Expected images with captions and reinforcements in the {split} split ({origins}), got no usable sample "
            f"among {sum(causes.values())} of {len(self)} ({what}; for example {example}): check the shards{hint}."
        )


def _image_in(members: dict[str, bytes]) -> bytes | None:
    return next((content for kind, content in members.items() if f".{kind}" in IMAGE_SUFFIXES), None)
