"""Frozen image towers that captioning looks through: of a training here, or of any model of open_clip."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ..base.frozen import FrozenTeacher
from ..networks.clip_preprocessing import Preprocessing
from ..networks.published_clip import load_published
from .pretrained import as_clip, preprocessing_of_training, rebuild_student


class Tower(NamedTuple):
    """An image tower: frozen, in eval mode, in float32.

    Attributes:
        network: images [B, 3, S, S] to features [B, D], projected and of any length.
        preprocessing: what it expects to be done with an image.
        origin: its model, where its weights are from, and their sha256.
    """

    network: FrozenTeacher[Any]
    preprocessing: Preprocessing
    origin: dict[str, str]


class _ImageSide(nn.Module):
    """The image tower of one of open_clip's models."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, S, S] to [B, D], not scaled to unit length."""
        features: Tensor = self.model.encode_image(image, normalize=False)
        return features


def load_tower(model: str | None, weights: str) -> Tower:
    """Load an image tower.

    Args:
        model: as in `load_published`; not used where `weights` is a checkpoint of `MMLGModule`.
        weights: such a checkpoint, or as in `load_published`.

    Raises:
        FileNotFoundError: if there is no such file or folder.
        ValueError: if there is no such model or tag, or the weights are of another model.
        RuntimeError: if the weights cannot be read, downloaded or loaded.
    """
    trained = _of_training(Path(weights).expanduser())
    if trained is not None:
        frozen, preprocessing = FrozenTeacher(trained[0], "tower", "model.weights"), trained[1]
        return Tower(frozen, preprocessing, {"model": "CLIP", "weights": weights, "sha256": frozen.fingerprint()})
    outside = load_published(model, weights)
    origin = {"model": outside.model, "weights": outside.weights, "sha256": outside.sha256}
    return Tower(FrozenTeacher(_ImageSide(outside.network)), outside.preprocessing, origin)


def _of_training(path: Path) -> tuple[nn.Module, Preprocessing] | None:
    """The image tower of a CLIP that was trained here; None where the file is something else."""
    if path.suffix != ".ckpt":
        return None
    if not path.exists():
        raise FileNotFoundError(f"Found no checkpoint {str(path)!r}, expected that of a training: correct the path.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    if "model" in content.get("hyper_parameters", {}):  # what `load_published` reads
        return None
    source = f"the checkpoint {str(path)!r}"
    student = rebuild_student(content, source)
    return as_clip(student).visual, Preprocessing.of(preprocessing_of_training(content), source)
