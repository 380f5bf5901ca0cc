"""Images of a folder that are searched in a store in place of being embedded."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...common.errors import UserError
from ...common.messages import say
from ...datamodules.stores.store import FeatureStore
from ..evaluate.model import ImageTextModel
from ..search.index import StoreSearch
from ..search.work import check_model
from .folder import ImageFolder, is_below


@dataclass(frozen=True)
class StoredIndex:
    """Rows of a store whose images are in a folder.

    Attributes:
        search: Search in the store.
        by_row: Paths of the images below the folder by their rows.
    """

    search: StoreSearch
    by_row: dict[int, str]

    @property
    def names(self) -> Sequence[str]:
        """Paths of the images below the folder."""
        return list(dict.fromkeys(self.by_row.values()))

    def best(self, query: Tensor, count: int) -> list[tuple[str, float]]:
        """Return the paths of the images with the highest cosines with a unit-length embedding [E], best first."""
        # Rows of images elsewhere, and further rows of an image, are left out afterwards.
        hit_count = count
        while True:
            hits = self.search.search(query[None], hit_count)
            best: dict[str, float] = {}
            for row, score in zip(hits.row[0].tolist(), hits.score[0].tolist(), strict=True):
                if row in self.by_row:
                    best.setdefault(self.by_row[row], score)
            if len(best) >= min(count, len(self.names)) or hit_count >= len(self.search):
                return list(best.items())[:count]
            hit_count *= 4

    def log_sum(self, query: Tensor, scale: float) -> float | None:
        """Return None: an index compares a text with some of the rows."""
        return None


def stored_folder(model: ImageTextModel, folder: ImageFolder, store: str) -> StoredIndex:
    """Open the store of the images of a folder.

    Args:
        model: The model.
        folder: The images.
        store: Folder of the store.

    Raises:
        UserError: If the store is of another model, or of none of these images.
    """
    opened = FeatureStore(store)
    check_model(opened, model)
    search = StoreSearch(opened, "image")
    usable = opened.usable().tolist()
    by_row = {}
    for row, name in enumerate(opened.names()):
        if usable[row] and os.path.isabs(name) and is_below(folder.root, path := Path(name)):
            by_row[row] = str(path.resolve().relative_to(folder.root))
    if not by_row:
        raise UserError(
            f"Expected a store with images of {str(folder.root)!r} after --store, got {store!r} with none: give the "
            "folder of its images after --images."
        )
    say(search.described(10))
    return StoredIndex(search, by_row)
