"""Fine-tuning of a descendant's vision tower for image classification (appendix A of the MM-LG paper)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from open_clip.transformer import VisionTransformer
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO, ClassPredictionWriter, missing_callbacks
from ..base.fitting import load_fitting
from ..base.initial_weights import InitialWeights
from ..base.sharding import shard
from ..evaluation.classification import Accuracy, Batch, ClassifierModule
from ..networks.attention import set_clip_attention
from ..networks.precision import at_least_float32
from ..optim.adamw import AdamWModule

_TOWERS = ("tower.", "student.visual.")  # in a checkpoint of this class, and of a CLIP's training
_PROJECTION, _POSITIONS = "proj", "positional_embedding"


class VisionClassifierModule(AdamWModule, InitialWeights, ClassifierModule):
    """open_clip's ViT with a new linear layer on its class token; all of it trains.

    The tower, `tower`, starts from an activated descendant (`weights`), from a learngene (a
    `LearngeneExpansionCallback` with `target: tower`), or at random. It ends with its last norm: the projection into
    the space of images and texts is left out. The paper describes no head; this is the usual one.

    Shapes: B images of S pixels a side, C classes.

    Args:
        num_classes: number of classes C. The command line sets it from the data's, where that is given.
        width: values of a token (open_clip's ViT-S-16).
        heads: number of attention heads (open_clip's ViT-S-16).
        layers: number of layers of the tower (paper: 6, 8 or 12).
        patch_size: side of a patch, pixels (paper).
        image_size: side S of the square images, pixels (paper). The command line sets it from the data's.
        weights: a checkpoint, file or folder, to take the tower from: of `MMLGModule` with an ordinary CLIP as student,
            or of this class. For another size of images the position embeddings are resampled. The linear layer is
            new in any case.
        learning_rate: learning rate at its peak (paper).
        warmup_steps: optimizer steps of warm-up (paper); a tenth of the run where that is not longer.
        weight_decay: weight decay of AdamW (paper); vectors are spared.
        betas: beta1 and beta2 of AdamW (as in extraction; the paper does not say).
        eps: epsilon of AdamW (the same).

    Raises:
        ValueError: for sizes that do not fit together.
    """

    def __init__(
        self,
        num_classes: int = 100,
        width: int = 384,
        heads: int = 6,
        layers: int = 12,
        patch_size: int = 16,
        image_size: int = 224,
        weights: str | None = None,
        learning_rate: float = 1e-4,
        warmup_steps: int = 5_000,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if width % heads:
            raise ValueError(f"A width of {width} does not divide into {heads} heads: change one of them.")
        if image_size % patch_size:
            raise ValueError(f"Images of {image_size} pixels do not divide into patches of {patch_size}: change one.")
        self.tower = VisionTransformer(image_size, patch_size, width, layers, heads, mlp_ratio=4.0)
        self.tower.proj = None
        set_clip_attention(self.tower)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self.accuracy = Accuracy()

    def configure_callbacks(self) -> list[Callback]:
        """Supply what writes predictions, unless the user's own is there."""
        return missing_callbacks(self.trainer.callbacks, ClassPredictionWriter())  # type: ignore[attr-defined]

    def evaluates_initial_weights(self) -> bool:
        """Never: the linear layer would be random."""
        return False

    def load_initial_weights(self) -> None:
        """Start the tower from `weights`, where they are given; what was done is logged."""
        if self.hparams["weights"] is not None:
            rank_zero_info(load_tower(self.tower, self.hparams["weights"], self.hparams["heads"]))

    def configure_model(self) -> None:
        """Shard the tower where the strategy shards."""
        shard(self, [self.tower])

    def on_fit_start(self) -> None:
        """Load the initial weights, and compare class counts.

        Raises:
            ValueError: if the data has another number of classes.
        """
        super().on_fit_start()
        self.check_classes()

    def forward(self, image: Tensor) -> Tensor:
        """Images [B, 3, S, S] to logits [B, C]."""
        logits: Tensor = self.head(self.tower(image))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy with the labels."""
        loss = F.cross_entropy(at_least_float32(self(batch["image"])), batch["label"])
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss


def load_tower(tower: VisionTransformer, source: str, heads: int) -> str:
    """Fill a vision tower without projection from a checkpoint.

    Args:
        tower: what to fill.
        source: checkpoint, file or folder, of a training of a CLIP of open_clip's or of `VisionClassifierModule`.
        heads: of the tower's attention, of which its weights say nothing.

    Returns:
        What was done, for a log line.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        RuntimeError: if it cannot be read.
        ValueError: if it has no such tower, or one of another size. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"Found no checkpoint {source!r} to start from: correct model.weights.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    state = _tower_state(content, source)
    found = content.get("hyper_parameters", {}).get("heads", heads)
    if found != heads:
        raise ValueError(f"Found a tower with {found} heads in {source!r}, expected {heads}: set model.heads to that.")
    resized = _resize_positions(state, tower)
    load_fitting(tower, state, f"the vision tower from {source!r}")
    return f"The vision tower starts from {source!r}{resized}."


def _tower_state(content: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """The tower's part of a checkpoint, without projection, under its own names."""
    state: Mapping[str, Tensor] = content.get("state_dict", {})
    for prefix in _TOWERS:
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if own:
            own.pop(_PROJECTION, None)
            return own
    if any(name.startswith("student.blocks.") for name in state):
        raise ValueError(
            f"Found an extraction in {source!r}, expected a training of a descendant: expand the learngene that it "
            "wrote, with a LearngeneExpansionCallback instead of model.weights."
        )
    raise ValueError(
        f"Found no vision tower of open_clip's in {source!r}, expected a checkpoint of MMLGModule with an ordinary "
        "CLIP as student, or of VisionClassifierModule: correct model.weights."
    )


def _resize_positions(state: dict[str, Tensor], tower: VisionTransformer) -> str:
    """Resample position embeddings [1 + n, V] for the tower's grid of patches, in place; what was done, or nothing."""
    table, (side, _) = state.get(_POSITIONS), tower.grid_size
    if table is None or table.dim() != 2:
        return ""
    found = math.isqrt(max(len(table) - 1, 0))
    if found == side or found**2 != len(table) - 1:  # if that is wrong it is listed as misshapen
        return ""
    # Bicubic with antialiasing, which is open_clip's way too.
    state[_POSITIONS] = resample_abs_pos_embed(table[None], [side, side], num_prefix_tokens=1)[0]
    return f", with positions resampled from {found}x{found} to {side}x{side} patches"
