"""MobileCLIP's settings, in groups. "Paper" is arXiv 2311.17049, "MobileCLIP2" arXiv 2508.20691."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...callbacks.ema import Warmup
from ...common.errors import UserError
from ...common.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, RATE, SHARE, SettingsGroup
from ..core.settings import settings
from ..networks.clip.preprocessing import ImageSettings
from .ensemble import Teacher


@dataclass(frozen=True)
class VisionSettings(ImageSettings):
    """Images of the student. The command line takes the first four from the data.

    Args:
        image_size: side of the square images in pixels; None means the model's own.
        image_mean: mean of each channel for exports, if no datamodule of this package records it; None means the
            model's own.
        image_std: standard deviation that belongs to `image_mean`.
        image_interpolation: interpolation of the resize for exports; None means the model's own.
        range_augment: target PSNR in dB, at the start and at the end of the run, of images that `RangeAugment` changes
            for the student only (paper: 40 and 20; MobileCLIP2 and the released scripts: none); None leaves them.

    Raises:
        UserError: If there are not two targets.
    """

    range_augment: Annotated[tuple[float, float] | None, POSITIVE] = None

    def __post_init__(self) -> None:
        if self.range_augment is not None and len(self.range_augment) != 2:
            raise UserError(
                f"Expected two PSNRs in dB as vision.range_augment, got {self.range_augment}: give those at "
                "the start and at the end, such as [40, 20]."
            )


@dataclass(frozen=True)
class TeacherSettings(SettingsGroup, option="teacher"):
    """The teachers, whose concatenated embeddings the data holds or the training step computes.

    Args:
        distillation_weight: lambda of L_Total (paper: 1 for the S models and MobileCLIP2, 0.75 for B); 0 leaves the
            teachers out.
        dims: embedding dimension of each teacher; None means those in the data's `manifest.json`, else DataCompDR's,
            768 both.
        scales: factor of each teacher's cosines, 1 / temperature; None means those in `manifest.json`, else 100 each
            (DataCompDR; DFNDR: 70 and 60).
        distilled: numbers of the stored teachers that are distilled, counted from 0 in the order of their embeddings;
            None means all.
        models: published models that embed each batch online, in place of stored embeddings, each with its scale:
            pairs need no reinforcement then. They take the student's images, resized and normalized, and its token
            ids or, with another tokenizer, the real captions by their own. The checkpoint holds their fingerprint
            instead of their weights.
        mask_same_text: whether other pairs of the same real caption, like those of the same image, are left out of the
            negatives in a training without teachers.
    """

    distillation_weight: Annotated[float, SHARE] = 1.0
    dims: Annotated[list[int] | None, COUNT] = None
    scales: Annotated[list[float] | None, POSITIVE] = None
    distilled: Annotated[list[int] | None, NOT_NEGATIVE] = None
    models: list[Teacher] | None = None
    mask_same_text: bool = True

    def online(self) -> list[Teacher]:
        """Return `models`, which are mappings in a checkpoint; none with a weight of 0."""
        return [settings(Teacher, model) for model in self.models or ()] if self.distillation_weight > 0 else []

    def __post_init__(self) -> None:
        if self.distillation_weight > 0 and self.dims is not None and not self.dims:
            raise UserError("Expected a teacher to distill from, got no teacher.dims: give the dimension of each.")
        if self.distilled is not None and len(set(self.distilled)) != max(1, len(self.distilled)):
            raise UserError(
                f"Expected different numbers of stored teachers as teacher.distilled, got {self.distilled}: give each "
                "once, as in [0], or null for all."
            )
        of_stored = [name for name in ("dims", "scales", "distilled") if getattr(self, name) is not None]
        if self.models is not None and (not self.models or of_stored):
            raise UserError(
                "Expected teacher.models without settings of stored teachers, got "
                f"{f'teacher.{of_stored[0]} beside them' if self.models else 'none'}: leave one out, or set it to null."
            )


@dataclass(frozen=True)
class MomentumSettings(SettingsGroup, option="momentum"):
    """The moving average of the student, which is evaluated and exported.

    Args:
        momentum: momentum (paper: 0.9995); None evaluates the student itself, as the released scripts do.
        warmup: whether the momentum is at most (1 + n) / (10 + n) after n steps (`EMAPair`), since the average of a
            short run is otherwise close to its initial value. "short" does so in runs of fewer than 10 / (1 - momentum)
            steps (20,000), unlike the paper's of 200,000.
    """

    momentum: Annotated[float | None, SHARE] = 0.9995
    warmup: Warmup = "short"


@dataclass(frozen=True)
class OptimSettings(SettingsGroup, option="optim"):
    """AdamW with a linear warm-up, an optional constant phase and half a cosine, as in open_clip.

    Args:
        learning_rate: peak learning rate (paper).
        min_learning_rate: learning rate at the last step (paper; MobileCLIP2-S3 and -S4, and the released scripts: 0).
        warmup_steps: optimizer steps of the warm-up (paper: 2000; MobileCLIP2-S0 and -S2: 10,000; released scripts:
            1000); a tenth of the run if the run is not longer.
        constant_steps: first step of the cosine, warm-up included; the rate is constant before (paper: B-LT 300,000 of
            600,000 steps, else none).
        weight_decay: weight decay of matrices (paper); norms, biases and scales do not decay.
        decay_layer_scales: whether the scales of residual branches decay, as in the released scripts.
        betas: beta1 and beta2 (paper).
        eps: epsilon (open_clip: 1e-6 for models with "vit" in their name).
    """

    learning_rate: Annotated[float, RATE] = 1e-3
    min_learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-6
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 2000
    constant_steps: Annotated[int, NOT_NEGATIVE] = 0
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.2
    decay_layer_scales: bool = False
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.95)
    eps: Annotated[float, POSITIVE] = 1e-8

    def __post_init__(self) -> None:
        self.check_order("min_learning_rate", "learning_rate")
