"""Fine-tuning of a descendant's vision tower for image classification (MM-LG: arXiv 2506.16673, section 4.3)."""

from __future__ import annotations

from typing import Annotated, Any

import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import ClassPredictionWriter, missing_callbacks
from ...common.ranges import COUNT
from ...common.sizes import check_heads, check_patches
from ..base.method import Method
from ..core.precision import at_least_float32
from ..evaluation.classification import Batch, ClassificationEvaluation, check_classes
from ..networks.attention import set_clip_attention
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupCosine
from .settings import ClassifierOptimSettings, ClassifierVisionSettings
from .towers import load_vision_tower


class VisionClassifierModule(Method):
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

        size, patch, width = self.vision.image_size, self.vision.patch_size, self.vision.width
        check_heads(width, self.vision.heads)
        check_patches(size, patch)
        self.tower = VisionTransformer(size, patch, width, self.vision.depth, self.vision.heads, mlp_ratio=4.0)
        self.tower.proj = None
        set_clip_attention(self.tower)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
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
        return missing_callbacks(self.trainer.callbacks, ClassPredictionWriter())  # type: ignore[attr-defined]

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
