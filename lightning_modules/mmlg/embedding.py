"""Embeddings of images by a frozen image tower, made once and read by any number of trainings."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from ...callbacks import ImageEmbeddingWriter, missing_callbacks
from ..base.checkpoints import CheckpointModule
from ..base.frozen import FrozenTeacher
from ..networks.precision import at_least_float32
from .towers import load_tower


class ImageEmbeddingModule(CheckpointModule):
    """Embeds images, for `predict`; captioning trains on the file that `ImageEmbeddingWriter` writes.

    The embeddings are the tower's projected features, not scaled to unit length. Images are prepared as the tower
    expects it, whatever transform the datamodule has.

    Args:
        weights: weights of the tower: a checkpoint of a CLIP that `MMLGModule` trained; or a tag of open_clip's, a
            folder or a file, as in `load_published`.
        model: one of open_clip's or MobileCLIP's names; not used where `weights` is a checkpoint of `MMLGModule` or a
            folder, which tell it.
    """

    def __init__(self, weights: str, model: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tower: FrozenTeacher[Any] = FrozenTeacher(nn.Identity())  # until a prediction needs it
        self.origin: dict[str, str] | None = None

    def configure_callbacks(self) -> list[Callback]:
        """Supply the writer, unless the user's own is there."""
        return missing_callbacks(self.trainer.callbacks, ImageEmbeddingWriter())  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the tower, and let the datamodule prepare images as it expects them.

        Raises:
            ValueError: if the datamodule has no transform for evaluation.
        """
        tower = load_tower(self.hparams["model"], self.hparams["weights"])
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "eval_transform"):
            raise ValueError(
                f"Found no eval_transform in {type(data).__name__}, expected a datamodule of images, such as "
                "ImageTextDataModule: give one as data."
            )
        data.eval_transform = tower.preprocessing.transform()
        self.tower, self.origin = tower.network, tower.origin

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        """Embed images [B, 3, S, S]: [B, D] in float32."""
        weight = next(self.tower.network.parameters())
        return at_least_float32(self.tower.network(image.to(weight.dtype)))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Embeddings [B, D], with the numbers [B] of the images in their data set and their ids."""
        return {name: batch[name] for name in ("sample_index", "image_id")} | {"embedding": self(batch["image"])}
