"""Sources of each split, in the forms that datamodules accept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import UserError
from ...common.urls import keep
from .open import Opening
from .resolve import Source, as_source
from .stream import Stream
from .table import PairTable

if TYPE_CHECKING:
    from ..base.stages import Split
    from .layout import Layout

Sources = str | Source | list[str | Source] | None


@dataclass
class PairSources:
    """Sources of the image-caption pairs of each split.

    Args:
        sources: sources by split.
        opening: settings that all sources share.
        max_pixels: images with more pixels are refused.
        streaming: whether to stream the rows instead of memory-mapping a copy.
    """

    sources: dict[Split, list[str | Source]]
    opening: Opening
    max_pixels: int
    streaming: bool = False

    def open(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        opening = dataclasses.replace(self.opening, need_captions=split != "predict")
        return [opening.open(source, split, self.streaming) for source in self.sources[split]]

    def rows(self, split: Split, clean: bool, max_words: int) -> PairTable | Stream | None:
        """Open and check the rows of a split.

        Args:
            split: the split.
            clean: whether to apply ALBEF's caption cleaning.
            max_words: number of words that the cleaning keeps.

        Returns:
            The rows; None if the split has no source.

        Raises:
            UserError: If a source cannot be opened, or no probed row can be used.
        """
        parts = self.open(split)
        if not parts:
            return None
        rows = Stream(parts, self.max_pixels) if self.streaming else PairTable(parts, self.max_pixels)
        rows.check(split, split != "predict", clean, max_words)
        return rows


def by_split(train: Sources, validation: Sources, test: Sources, predict: Sources) -> dict[Split, list[str | Source]]:
    """Return the arguments of a datamodule as lists of sources by split.

    Raises:
        UserError: If a source that is not for training has a weight.
    """
    sources: dict[Split, list[str | Source]] = {
        "train": as_list(train),
        "validation": as_list(validation),
        "test": as_list(test),
        "predict": as_list(predict),
    }
    for split, several in sources.items():
        for source in several if split != "train" else ():
            if isinstance(source, Source) and source.weight != 1:
                raise UserError(
                    f"Expected no weight of {source.path!r} in the {split} split, got {source.weight}: remove it, "
                    "since an evaluation reads each image once."
                )
    return sources


def as_list(sources: Sources) -> list[str | Source]:
    """Convert sources in any form to a list."""
    several = keep(sources if isinstance(sources, (list, tuple)) else [] if sources is None else [sources])
    return [source if isinstance(source, str) else as_source(source) for source in several]
