"""A store of features: a folder of shards with a manifest, read row by row from mapped files."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from ...common.errors import UserError
from ...common.manifest import MANIFEST
from .shards import FAULT, IMAGE, IMAGE_ID, KEY, Shard, shard_path

Side = Literal["image", "text"]


class FeatureStore:
    """Features of the rows of a data set, as `vlightning embed` writes them.

    Shards are mapped when they are read, so that all loader workers share their pages.

    Args:
        folder: the folder.

    Raises:
        UserError: If the folder is no store, or the store is not complete.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        path = self.folder / MANIFEST
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            self.sides: Mapping[str, Any] = {side: self.manifest[f"{side}s"] for side in ("image", "text")}
            self.shard_size = int(self.manifest["data"]["shard_size"])
            self._length = int(sum(self.manifest["data"]["rows"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"Expected a store that `vlightning embed` wrote in {str(self.folder)!r}, got no manifest of one "
                f"({type(error).__name__}): correct the folder."
            ) from error
        if not self.manifest.get("complete"):
            raise UserError(
                f"Expected a complete store in {str(self.folder)!r}, got one whose writing was stopped: give its "
                "command again, which goes on."
            )

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        # Loader workers that are spawned map the files themselves.
        return {name: value for name, value in self.__dict__.items() if name != "_shards"}

    @property
    def views(self) -> int:
        """Number of augmented views of an image; 0 for the plain view, of which there is one."""
        images = self.sides["image"]
        return 0 if images is None else int(images["views"])

    def width(self, side: Side) -> int:
        """Return the dimension of the features of images or texts."""
        return int(self.sides[side]["width"])

    @cached_property
    def _shards(self) -> dict[int, Shard]:
        return {}

    def shard(self, number: int) -> Shard:
        """Return a shard, which stays mapped.

        Raises:
            UserError: If it is missing or damaged, or has another number of rows.
        """
        if number not in self._shards:
            self._shards[number] = self._mapped(number)
        return self._shards[number]

    def _mapped(self, number: int) -> Shard:
        path = shard_path(self.folder, number)
        try:
            shard = Shard(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(
                f"Expected a shard of the store in {str(path)!r}, got a file that cannot be read "
                f"({type(error).__name__}): remove it, and give the command of the store again."
            ) from error
        rows = min(self.shard_size, len(self) - number * self.shard_size)
        if len(shard) != rows:
            raise UserError(
                f"Expected {rows} rows in {str(path)!r}, got {len(shard)}: remove the file, and give the command "
                "of the store again."
            )
        return shard

    @property
    def shards(self) -> Iterator[Shard]:
        """All shards, in their order; each is mapped for its turn only, so that no pass holds all of their pages."""
        return (self._mapped(number) for number in range(-(-len(self) // self.shard_size)))

    def _locate(self, row: int) -> tuple[Shard, int]:
        number, position = divmod(row, self.shard_size)
        return self.shard(number), position

    def fault(self, row: int) -> str | None:
        """Return why a row cannot be used; None for a usable one."""
        shard, position = self._locate(row)
        cause = shard.value(FAULT, position)
        return None if cause is None else str(cause)

    def key(self, row: int) -> int | None:
        """Return the `row_key` of a row's image."""
        shard, position = self._locate(row)
        key = shard.value(KEY, position)
        return None if key is None else int(key)

    def image(self, row: int, view: int = 0) -> torch.Tensor:
        """Return the features [D] of a view of a row's image.

        Args:
            row: index of the row.
            view: any number; views repeat.
        """
        shard, position = self._locate(row)
        width = self.width("image")
        start = view % max(self.views, 1) * width
        return torch.from_numpy(shard.images[position, start : start + width].copy())

    def text(self, row: int, caption: str) -> torch.Tensor | None:
        """Return the features [E] of a caption of a row; None if the row has no such caption."""
        shard, position = self._locate(row)
        captions = shard.captions(position)
        if caption not in captions:
            return None
        number = int(shard.text_starts[position]) + captions.index(caption)
        return torch.from_numpy(shard.texts[number].copy())

    def name(self, row: int) -> str:
        """Return the path of the image of a row, or its source and row."""
        shard, position = self._locate(row)
        return str(shard.value(IMAGE, position))

    def names(self) -> list[str]:
        """Return the path of the image of each row, or its source and row."""
        return [str(name) for shard in self.shards for name in shard.values(IMAGE)]

    def image_ids(self) -> list[int | None]:
        """Return the ids of the images of all rows."""
        return [None if number is None else int(number) for shard in self.shards for number in shard.values(IMAGE_ID)]

    def usable(self) -> np.ndarray:
        """Return which rows can be used, boolean [N]."""
        return np.array([cause is None for shard in self.shards for cause in shard.values(FAULT)], dtype=bool)

    def caption_at(self, position: int) -> str:
        """Return a caption by its position among the captions of all rows."""
        number = bisect_right(self._caption_starts, position) - 1
        values = self.shard(number).batch.column("captions").values
        caption: str = values[position - self._caption_starts[number]].as_py()
        return caption

    @cached_property
    def _caption_starts(self) -> Sequence[int]:
        counts = [int(shard.text_starts[-1]) for shard in self.shards]
        starts: list[int] = np.cumsum([0, *counts]).tolist()
        return starts[:-1]
