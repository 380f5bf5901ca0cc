"""What all trainings of one new tower have in common: the losses, the optimizer, the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from ...callbacks import RetrievalPredictionWriter, StepSeedCallback, gather, missing_callbacks, rank
from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE, SettingsGroup
from ..base.method import Method
from ..core.memory import MemorySettings
from ..core.trainers import callbacks_of
from ..evaluation.protocol import Batch
from ..losses.contrast import pair_ids
from ..losses.new_tower import TowerFeatures, new_tower_losses
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupCosine
from .settings import OptimSettings

LEARNING_RATE = 1e-4
"""Peak learning rate without a given one, that of a trained encoder with a new projection (as in two_towers.yaml)."""


@dataclass(frozen=True)
class NewTowerLossSettings(SettingsGroup, option="loss"):
    """The losses of a new tower, which are weighted and added up; see `losses/new_tower.py`.

    Args:
        feature: weight of the feature distillation, 1 - cosine of the new and the old feature of a row.
        similarity: weight of the similarity distillation, the divergence of MobileCLIP's reinforced loss.
        contrast: weight of the contrast with the partners of the rows.
        prefixes: lengths of prefixes of the features that are trained beside them (Matryoshka), such as 256, 128 and
            64.
        int8: whether the similarities are computed from features as an int8 index stores them.
        mask_same_image: whether, in the contrast, other pairs of the same image are not negatives.
        mask_same_text: whether, in the contrast, other pairs of the same text are not negatives.

    Raises:
        UserError: If all weights are 0.
    """

    feature: Annotated[float, NOT_NEGATIVE] = 1.0
    similarity: Annotated[float, NOT_NEGATIVE] = 1.0
    contrast: Annotated[float, NOT_NEGATIVE] = 0.0
    prefixes: Annotated[list[int] | None, COUNT] = None
    int8: bool = False
    mask_same_image: bool = True
    mask_same_text: bool = True

    def __post_init__(self) -> None:
        if not self.feature + self.similarity + self.contrast:
            raise UserError(
                "Expected a loss of a new tower, got 0 as loss.feature, loss.similarity and loss.contrast: give one of "
                "them a weight."
            )


class TowerTraining(Method):
    """Base of the methods that train one new tower by distillation.

    The constructor of a subclass sets the attributes below.
    """

    loss: NewTowerLossSettings
    optim: OptimSettings
    memory: MemorySettings

    def weighted_losses(self, new: Tensor, old: Tensor, partner: Tensor, scale: Tensor | float, batch: Batch) -> Tensor:
        """Return the weighted sum of the losses of a batch, 0-D, and log each.

        Args:
            new: unit-length features [b, d] of the rows by the new tower, with gradient.
            old: those of the tower that it replaces.
            partner: those that both are compared with.
            scale: logit scale of the trained pair.
            batch: the batch, whose ids decide which rows are no negatives of each other.
        """
        features = TowerFeatures(new, old, partner, gather(new, True), gather(old), gather(partner), scale)
        loss = self.loss
        asked = loss.contrast > 0
        ids = pair_ids(batch, loss.mask_same_image, loss.mask_same_text) if asked else None
        losses = new_tower_losses(
            features, loss.prefixes or (), loss.int8, rank() * len(new), self.memory.loss_rows, asked, ids
        )
        total = loss.feature * losses.feature + loss.similarity * losses.similarity + loss.contrast * losses.contrast
        self.log("train/loss", total.detach(), prog_bar=True)
        self.log("train/feature", losses.feature.detach())
        self.log("train/similarity", losses.similarity.detach())
        if asked:
            self.log("train/contrast", losses.contrast.detach())
        return total

    def check_prefixes(self, width: int) -> None:
        """Refuse prefixes that are not shorter than the embedding dimension `width`.

        Raises:
            UserError: If one is not.
        """
        if longest := [length for length in self.loss.prefixes or () if length >= width]:
            raise UserError(
                f"Expected lengths below {width}, the embedding dimension of the pair, as loss.prefixes, got "
                f"{longest[0]}: leave it out."
            )

    def configure_callbacks(self) -> list[Callback]:
        """Add seeds and the writer of predictions, if they are missing."""
        needed = (StepSeedCallback(), RetrievalPredictionWriter())
        return missing_callbacks(callbacks_of(self), *needed)

    @property
    def learning_rate(self) -> float:
        """The peak learning rate."""
        return self.optim.learning_rate or LEARNING_RATE

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.learning_rate, self.optim.weight_decay, self.optim.betas, self.optim.eps)

    def paper_schedule(self) -> Schedule:
        """Return a linear warm-up and half a cosine to 0."""
        return WarmupCosine(self.learning_rate, warmup_start=0.0, warmup_share=self.optim.warmup_share)
