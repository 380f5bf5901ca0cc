"""The sources of each split, as datamodules take them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .open import Opening
from .resolve import Source, as_source
from .stream import Stream
from .table import PairTable

if TYPE_CHECKING:
    from ..core.stages import Split
    from .layout import Layout

Sources = str | Source | list[str | Source] | None


@dataclass
class PairSources:
    """The sources of image-caption pairs of each split.

    Args:
        sources: sources by split.
        opening: settings that all sources share.
        max_pixels: images with more pixels are refused.
        streaming: whether to read on the fly, without a memory-mapped copy.
    """

    sources: dict[Split, list[str | Source]]
    opening: Opening
    max_pixels: int
    streaming: bool = False

    def open(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split."""
        opening = dataclasses.replace(self.opening, need_captions=split != "predict")
        return [opening.open(source, split, self.streaming) for source in self.sources[split]]

    def rows(self, split: Split, clean: bool, max_words: int) -> PairTable | Stream | None:
        """Open and check the rows of a split; None if it has no source.

        Raises:
            UserError: none of the rows can be used.
        """
        parts = self.open(split)
        if not parts:
            return None
        rows = Stream(parts, self.max_pixels) if self.streaming else PairTable(parts, self.max_pixels)
        rows.check(split, split != "predict", clean, max_words)
        return rows


def by_split(train: Sources, validation: Sources, test: Sources, predict: Sources) -> dict[Split, list[str | Source]]:
    """Return a datamodule's arguments as lists of sources by split."""
    return {
        "train": listed(train),
        "validation": listed(validation),
        "test": listed(test),
        "predict": listed(predict),
    }


def listed(sources: Sources) -> list[str | Source]:
    """Return sources in any form as a list."""
    several = sources if isinstance(sources, (list, tuple)) else [] if sources is None else [sources]
    return [source if isinstance(source, str) else as_source(source) for source in several]
