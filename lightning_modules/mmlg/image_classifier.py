"""Fine-tuning of a descendant's vision tower for image classification (MM-LG: arXiv 2506.16673, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from open_clip.transformer import VisionTransformer
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import AtomicCheckpointIO, ClassPredictionWriter, missing_callbacks
from ...common.errors import UserError
from ...common.ranges import COUNT, check_heads, check_patches
from ..base.method import Method
from ..core.fitting import load_fitting
from ..core.precision import at_least_float32
from ..core.trainers import callbacks_of
from ..evaluation.classification import Batch, ClassificationEvaluation, check_classes
from ..networks.attention import set_clip_attention
from ..networks.cifar.classifier import init_linear
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupCosine
from .settings import ClassifierOptimSettings, ClassifierVisionSettings

_TOWERS = ("tower.", "student.visual.")  # in checkpoints of MMLGImageClassifierModule and of MMLGModule
_POSITIONS = "positional_embedding"


class MMLGImageClassifierModule(Method):
    """open_clip's ViT with a new linear head on its class token; all parameters train.

    The tower is initialized from an activated descendant (`weights`), from a learngene (a `LearngeneExpansionCallback`
    with `target: tower`), or at random. It ends with its last norm, without the projection into the embedding space.
    The paper does not describe the head.

    Shapes: B images of S pixels a side, C classes.

    Args:
        num_classes: number of classes C. The command line sets it from the data's.
        vision: the vision tower.
        weights: checkpoint, a file or folder, to take the tower from: of `MMLGModule` with an ordinary CLIP as student,
            or of this class. For another image size the position embeddings are resampled. The head is new in any case.
        optim: AdamW and its schedule.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: If sizes do not fit together.
    """

    vision: ClassifierVisionSettings
    optim: ClassifierOptimSettings

    def __init__(
        self,
        num_classes: Annotated[int, COUNT] = 100,
        vision: ClassifierVisionSettings = ClassifierVisionSettings(),
        weights: str | None = None,
        optim: ClassifierOptimSettings = ClassifierOptimSettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.num_classes = num_classes
        self.weights = weights

        width = self.vision.width
        heads = self.vision.heads
        check_heads(width, heads)
        check_patches(self.vision.image_size, self.vision.patch_size)
        self.tower = VisionTransformer(
            self.vision.image_size, self.vision.patch_size, width, self.vision.depth, heads, mlp_ratio=4.0
        )
        self.tower.proj = None
        set_clip_attention(self.tower)
        self.head = nn.Linear(width, num_classes)
        init_linear(self.head)
        self.evaluation = ClassificationEvaluation()

    def forward(self, image: Tensor) -> Tensor:
        """Classify images [B, 3, S, S]: logits [B, C]."""
        logits: Tensor = self.head(self.tower(image))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross entropy with the labels."""
        loss = F.cross_entropy(at_least_float32(self(batch["image"])), batch["label"])
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        optim = self.optim
        return adamw(groups, optim.learning_rate, optim.weight_decay, optim.betas, optim.eps)

    def paper_schedule(self) -> Schedule:
        """Return linear warm-up, then cosine decay to 0."""
        return WarmupCosine(self.optim.learning_rate, self.optim.warmup_steps)

    def configure_callbacks(self) -> list[Callback]:
        """Add the writer of predictions, unless the user gave one."""
        return missing_callbacks(callbacks_of(self), ClassPredictionWriter())

    def sharded_networks(self) -> list[nn.Module]:
        """Return the tower; the head is in the module's own group."""
        return [self.tower]

    def evaluates_initial_weights(self) -> bool:
        """Return False: the head would be random."""
        return False

    def load_initial_weights(self) -> None:
        """Start the tower from `weights`, if given."""
        if self.weights is not None:
            rank_zero_info(load_vision_tower(self.tower, self.weights, self.vision.heads))

    def on_fit_start(self) -> None:
        """Load the initial weights, and compare the number of classes with the data's."""
        super().on_fit_start()
        check_classes(self, self.num_classes)


def load_vision_tower(tower: VisionTransformer, source: str, heads: int) -> str:
    """Fill a vision tower without projection from a checkpoint of `MMLGModule` or `MMLGImageClassifierModule`.

    Args:
        tower: the tower to fill.
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
    arguments = content.get("hyper_parameters", {})
    sizes = arguments.get("towers") or arguments.get("vision") or {}  # of MMLGModule, of this class
    trained_heads = sizes.get("heads", heads)
    if trained_heads != heads:
        raise UserError(
            f"Expected a tower with {heads} heads in {source!r}, got {trained_heads}: set model.vision.heads to that."
        )
    resampled = _resample_positions(state, tower)
    load_fitting(tower, state, f"the vision tower from {source!r}")
    return f"The vision tower starts from {source!r}{resampled}."


def _tower_state(content: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """Return the state of a checkpoint's vision tower, without projection."""
    state: Mapping[str, Tensor] = content.get("state_dict", {})
    for prefix in _TOWERS:
        tower = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if tower:
            tower.pop("proj", None)
            return tower
    if any(name.startswith("student.blocks.") for name in state):
        raise UserError(
            f"Expected the training of a descendant in {source!r}, got an extraction: expand the learngene that it "
            "wrote, with a LearngeneExpansionCallback instead of model.weights."
        )
    raise UserError(
        f"Expected a checkpoint of MMLGModule with an ordinary CLIP as student, or of MMLGImageClassifierModule, got "
        f"no vision tower of open_clip's in {source!r}: correct model.weights."
    )


def _resample_positions(state: dict[str, Tensor], tower: VisionTransformer) -> str:
    """Resample position embeddings [1 + n, V] in place for the tower's grid of patches; return a note for the log."""
    table = state.get(_POSITIONS)
    if table is None or table.dim() != 2:
        return ""
    side = tower.grid_size[0]
    trained_side = math.isqrt(max(len(table) - 1, 0))
    if trained_side == side or trained_side**2 != len(table) - 1:  # a wrong shape is reported by `load_fitting`
        return ""
    # Bicubic with antialiasing, as open_clip.
    state[_POSITIONS] = resample_abs_pos_embed(table[None], [side, side], num_prefix_tokens=1)[0]
    return f", with positions resampled from {trained_side}x{trained_side} to {side}x{side} patches"
