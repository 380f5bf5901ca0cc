"""Settings of the fine-tuning of a CLIP, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ...common.ranges import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    RATE,
    Range,
    SettingsGroup,
)
from ..core.settings import settings
from ..networks.clip.lora import LoRASettings


@dataclass(frozen=True)
class LossSettings(SettingsGroup, option="loss"):
    """The contrastive loss.

    Args:
        name: "softmax", CLIP's, or "sigmoid", SigLIP's of single pairs.
        mask_same_image: whether other pairs of the same image are not negatives.
        mask_same_text: whether other pairs of the same text are not negatives.
        max_logit_scale: upper bound of the logit scale, applied after each optimizer step (CLIP: 100).
        short_weight: weight of the contrast of short texts, if the data gives some (`data.short_texts`; Long-CLIP: 1).
        short_components: number of principal components of the image features of a batch that this contrast compares
            with short texts (Long-CLIP: 32); None takes the features themselves.
    """

    name: Literal["softmax", "sigmoid"] = "softmax"
    mask_same_image: bool = True
    mask_same_text: bool = True
    max_logit_scale: Annotated[float, Range(least=1)] = 100.0
    short_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    short_components: Annotated[int | None, COUNT] = 32


@dataclass(frozen=True)
class TuningSettings(SettingsGroup, option="tuning"):
    """Which weights train, and how fast.

    Args:
        lock_image: number of first blocks of the image tower that do not train, embeddings included; "all" locks the
            tower, in a pair that was not trained together except its projection.
        lock_text: number of first blocks of the text tower that do not train, embeddings included; "all" locks it
            likewise.
        layer_decay: factor of the learning rate from each layer of a tower to the layer below, separately for both
            towers; 1 gives all layers the same rate (BEiT: 0.65 to 0.75 for fine-tuning).
        batch_norm: "fixed" normalizes by the statistics of the pre-training, which do not change; "trained" by those of
            the batch.
        lora: trains low-rank adapters in place of the weights; those of locked layers stay zero.

    Raises:
        UserError: If a lock or the decay is impossible.
    """

    lock_image: Annotated[int | Literal["all"], NOT_NEGATIVE] = 0
    lock_text: Annotated[int | Literal["all"], NOT_NEGATIVE] = 0
    layer_decay: Annotated[float, POSITIVE_SHARE] = 1.0
    batch_norm: Literal["fixed", "trained"] = "fixed"
    lora: LoRASettings | None = None

    def __post_init__(self) -> None:
        if self.lora is not None:  # a mapping in a checkpoint
            object.__setattr__(self, "lora", settings(LoRASettings, self.lora))


@dataclass(frozen=True)
class OptimSettings(SettingsGroup, option="optim"):
    """AdamW with a linear warm-up over a share of the run, then half a cosine to 0.

    Args:
        learning_rate: peak learning rate. None: 1e-5, a hundredth of that of a pre-training, with which a model learns
            in some epochs and forgets little (WiSE-FT, arXiv 2109.01903, fine-tunes with 1e-5 to 3e-5); 2e-4 with LoRA.
        warmup_share: share of the run's steps in which the rate rises.
        weight_decay: weight decay of matrices (WiSE-FT: 0.1); norms, biases, scales and adapters do not decay.
        betas: beta1 and beta2 (CLIP).
        eps: epsilon (CLIP's ViTs).
    """

    learning_rate: Annotated[float | None, RATE] = None
    warmup_share: Annotated[float, BELOW_ONE] = 0.1
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.98)
    eps: Annotated[float, POSITIVE] = 1e-6
