"""Embeddings of images by a frozen image tower, computed once and read by any number of trainings."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO, ImageEmbeddingWriter, missing_callbacks
from ...common.errors import UserError
from ...common.preprocessing import Preprocessing
from ..base.exported import rebuild
from ..core.frozen import Frozen
from ..core.precision import at_least_float32
from ..core.trainers import datamodule_of
from ..networks.published_clip import load_published
from .module import MMLGModule
from .students import as_clip, student_preprocessing


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
        self.tower = tower.network
        self.origin = tower.origin

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        """Embed images [B, 3, S, S]: float32 [B, D]."""
        weight = next(self.tower.network.parameters())
        return at_least_float32(self.tower.network(image.to(weight.dtype)))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Return embeddings [B, D] with the positions [B] of the images in their data set and their ids."""
        return {name: batch[name] for name in ("sample_index", "image_id")} | {"embedding": self(batch["image"])}


class ImageTower(NamedTuple):
    """A frozen image tower in float32.

    Args:
        network: maps images [B, 3, S, S] to projected, unnormalized features [B, D].
        preprocessing: how the tower expects images to be prepared.
        origin: name of the model, source of its weights, and their sha256.
    """

    network: Frozen[Any]
    preprocessing: Preprocessing
    origin: dict[str, str]


class _OpenCLIPImageTower(nn.Module):
    """The image tower of one of open_clip's models."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Encode images [B, 3, S, S]: unnormalized features [B, D]."""
        features: Tensor = self.model.encode_image(image, normalize=False)
        return features


def load_image_tower(model: str | None, weights: str) -> ImageTower:
    """Load an image tower.

    Args:
        model: as in `load_published`; not used where `weights` is a checkpoint of `MMLGModule`.
        weights: a checkpoint of `MMLGModule`, or as in `load_published`.

    Raises:
        UserError: If there is no such file, folder, model or tag, or the weights are of another model.
    """
    path = Path(weights).expanduser()
    if path.suffix == ".ckpt":
        if not path.exists():
            raise UserError(f"Expected the checkpoint of a training, found none at {str(path)!r}: correct the path.")
        content = AtomicCheckpointIO().load_checkpoint(path)
        if "model" not in content.get("hyper_parameters", {}):  # else it is MobileCLIP's, which `load_published` reads
            source = f"the checkpoint {str(path)!r}"
            student = rebuild(MMLGModule, content["hyper_parameters"], content["state_dict"], source).student
            frozen = Frozen(as_clip(student.float().eval()).visual, "tower", "model.weights")
            origin = {"model": "CLIP", "weights": weights, "sha256": frozen.fingerprint()}
            return ImageTower(frozen, Preprocessing.from_dict(student_preprocessing(content), source), origin)
    loaded = load_published(model, weights)
    origin = {"model": loaded.model, "weights": loaded.weights, "sha256": loaded.sha256}
    return ImageTower(Frozen(_OpenCLIPImageTower(loaded.network)), loaded.preprocessing, origin)
