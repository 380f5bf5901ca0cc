"""Embeddings of images by a frozen image tower, computed once and read by any number of trainings."""

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ...callbacks import ImageEmbeddingWriter, missing_callbacks
from ...common.errors import UserError
from ..core.frozen import Frozen
from ..core.precision import at_least_float32
from ..core.trainers import datamodule_of
from .towers import load_image_tower


class ImageEmbeddingModule(LightningModule):
    """Embeds images in `predict`; captioning trains on the file that `ImageEmbeddingWriter` writes.

    Embeddings are the tower's projected features, not normalized. Images are prepared as the tower expects them; the
    datamodule's transform is replaced.

    Args:
        weights: weights of the tower: a checkpoint of `MMLGModule`; or a tag of open_clip's, a folder or a file, as in
            `load_published`.
        model: one of open_clip's or MobileCLIP's names; not used where `weights` is a checkpoint of `MMLGModule` or a
            folder, which name their model.
    """

    def __init__(self, weights: str, model: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weights = weights
        self.model = model
        self.tower: Frozen[Any] = Frozen(role="tower", argument="model.weights")  # loaded when a prediction starts
        self.origin: dict[str, str] | None = None

    def configure_callbacks(self) -> list[Callback]:
        """Add the writer, unless the user gave one."""
        return missing_callbacks(self.trainer.callbacks, ImageEmbeddingWriter())  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the tower, and have the datamodule prepare images as it expects them.

        Raises:
            UserError: If the datamodule has no transform for evaluation.
        """
        tower = load_image_tower(self.model, self.weights)
        data: Any = datamodule_of(self)
        if not hasattr(data, "eval_transform"):
            raise UserError(
                f"Expected a datamodule of images with an eval_transform, got {type(data).__name__}: give one such as "
                "ImageTextDataModule as data."
            )
        data.eval_transform = tower.preprocessing.transform()
        self.tower, self.origin = tower.network, tower.origin

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        """Embed images [B, 3, S, S]: float32 [B, D]."""
        weight = next(self.tower.network.parameters())
        return at_least_float32(self.tower.network(image.to(weight.dtype)))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Return embeddings [B, D] with the positions [B] of the images in their data set and their ids."""
        return {name: batch[name] for name in ("sample_index", "image_id")} | {"embedding": self(batch["image"])}
