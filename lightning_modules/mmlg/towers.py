"""Trained image towers: frozen ones that embed images, and initial weights of a classifier."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from open_clip.transformer import VisionTransformer
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.preprocessing import Preprocessing
from ..core.fitting import load_fitting
from ..core.frozen import Frozen
from ..core.settings import settings
from ..networks.published_clip import load_published
from .descendant import as_clip
from .pretrained import rebuild_student, student_preprocessing
from .settings import ClassifierVisionSettings, TowerSettings

_TOWERS = ("tower.", "student.visual.")  # in checkpoints of VisionClassifierModule and of MMLGModule
_PROJECTION, _POSITIONS = "proj", "positional_embedding"


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
    trained = _tower_of_training(Path(weights).expanduser())
    if trained is not None:
        frozen = Frozen(trained[0], "tower", "model.weights")
        return ImageTower(frozen, trained[1], {"model": "CLIP", "weights": weights, "sha256": frozen.fingerprint()})
    loaded = load_published(model, weights)
    origin = {"model": loaded.model, "weights": loaded.weights, "sha256": loaded.sha256}
    return ImageTower(Frozen(_OpenCLIPImageTower(loaded.network)), loaded.preprocessing, origin)


def _tower_of_training(path: Path) -> tuple[nn.Module, Preprocessing] | None:
    """Return the image tower of a checkpoint of `MMLGModule`; None for other files."""
    if path.suffix != ".ckpt":
        return None
    if not path.exists():
        raise UserError(f"Expected the checkpoint of a training, found none at {str(path)!r}: correct the path.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    if "model" in content.get("hyper_parameters", {}):  # MobileCLIP's, which `load_published` reads
        return None
    source = f"the checkpoint {str(path)!r}"
    student = rebuild_student(content, source)
    return as_clip(student).visual, Preprocessing.from_dict(student_preprocessing(content), source)


def load_vision_tower(tower: VisionTransformer, source: str, heads: int) -> str:
    """Fill a vision tower without projection from a checkpoint of `MMLGModule` or `VisionClassifierModule`.

    Args:
        tower: what to fill.
        source: path of the checkpoint, a file or folder.
        heads: number of attention heads of the tower, which its weights do not determine.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If there is no such checkpoint, or its tower does not fit. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"Expected a checkpoint to start from, found none at {source!r}: correct model.weights.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    state = _tower_state(content, source)
    found = _heads_of_training(content.get("hyper_parameters", {}))
    if found not in (None, heads):
        raise UserError(
            f"Expected a tower with {heads} heads in {source!r}, got {found}: set model.vision.heads to that."
        )
    resampled = _resample_positions(state, tower)
    load_fitting(tower, state, f"the vision tower from {source!r}")
    return f"The vision tower starts from {source!r}{resampled}."


def _heads_of_training(arguments: Mapping[str, Any]) -> int | None:
    """Return the attention heads of a training of `MMLGModule` or `VisionClassifierModule`; None of any other."""
    if "towers" in arguments:
        return settings(TowerSettings, arguments["towers"]).heads
    if "num_classes" in arguments and "vision" in arguments:
        return settings(ClassifierVisionSettings, arguments["vision"]).heads
    return None


def _tower_state(content: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """Return the state of a checkpoint's vision tower, without projection."""
    state: Mapping[str, Tensor] = content.get("state_dict", {})
    for prefix in _TOWERS:
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if own:
            own.pop(_PROJECTION, None)
            return own
    if any(name.startswith("student.blocks.") for name in state):
        raise UserError(
            f"Expected the training of a descendant in {source!r}, got an extraction: expand the learngene that it "
            "wrote, with a LearngeneExpansionCallback instead of model.weights."
        )
    raise UserError(
        f"Expected a checkpoint of MMLGModule with an ordinary CLIP as student, or of VisionClassifierModule, got no "
        f"vision tower of open_clip's in {source!r}: correct model.weights."
    )


def _resample_positions(state: dict[str, Tensor], tower: VisionTransformer) -> str:
    """Resample position embeddings [1 + n, V] in place for the tower's grid of patches; return a note for the log."""
    table, (side, _) = state.get(_POSITIONS), tower.grid_size
    if table is None or table.dim() != 2:
        return ""
    found = math.isqrt(max(len(table) - 1, 0))
    if found == side or found**2 != len(table) - 1:  # a wrong shape is reported by `load_fitting`
        return ""
    # Bicubic with antialiasing, as open_clip.
    state[_POSITIONS] = resample_abs_pos_embed(table[None], [side, side], num_prefix_tokens=1)[0]
    return f", with positions resampled from {found}x{found} to {side}x{side} patches"
