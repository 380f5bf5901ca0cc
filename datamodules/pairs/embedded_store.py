"""Embeddings of images from a store, by the name or the id of the image."""

from __future__ import annotations

from pathlib import Path

import torch

from ...common.errors import UserError
from ..stores.store import FeatureStore
from .embedded_rows import JoinOn


class StoreEmbeddings:
    """Features of the plain views of a store, indexed by the name or the id of the image.

    Rows of the same image have the same features, of which the first are read.

    Args:
        store: the store.
        join_on: the key by which embeddings are looked up.

    Raises:
        UserError: If the store has no images, or augmented views of them.
    """

    def __init__(self, store: FeatureStore, join_on: JoinOn) -> None:
        if store.sides["image"] is None or store.views:
            what = "texts only" if store.sides["image"] is None else f"{store.views} augmented views of each image"
            raise UserError(
                f"Expected a store with plain views of images as data.embeddings, got {str(store.folder)!r} with "
                f"{what}: embed the images without --views."
            )
        if store.sides["image"].get("normalized"):
            raise UserError(
                f"Expected a store of `vlightning embed` as data.embeddings, got {str(store.folder)!r} with normalized "
                "embeddings, as the demo and the evaluation keep them: embed the images."
            )
        self.store = store
        self.join_on = join_on
        self.paths: list[Path] = [store.folder]
        keys = store.names() if join_on == "image" else store.image_ids()
        usable = store.usable()
        self._rows: dict[str | int, int] = {}
        for row, key in enumerate(keys):
            if key is not None and usable[row]:
                self._rows.setdefault(key, row)
        model = store.manifest["model"]
        self.origin: dict[str, str] | None = {name: model[name] for name in ("model", "weights", "sha256")}

    @property
    def width(self) -> int:
        """The embedding dimension D."""
        return self.store.width("image")

    def __contains__(self, key: str | int) -> bool:
        return key in self._rows

    def __getitem__(self, key: str | int) -> torch.Tensor:
        """Return an embedding, float32 [D]."""
        return self.store.image(self._rows[key])
