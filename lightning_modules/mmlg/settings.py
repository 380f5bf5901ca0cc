"""Settings of MM-LG's modules, with the source of each default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from ...callbacks.learngene.sizes import LearngeneSizes
from ...common.ranges import BELOW_ONE, COUNT, FINITE, NOT_NEGATIVE, POSITIVE, RATE, SettingsGroup
from ..evaluation.ranking import Protocol

Three = tuple[float, float, float]


@dataclass(frozen=True)
class TowerSettings(SettingsGroup, option="towers"):
    """Sizes that both towers have in common, since they share blocks.

    Args:
        width: token dimension (open_clip's ViT-S-16).
        heads: number of attention heads (open_clip's ViT-S-16).
        depth: number of layers of each tower (paper); even for MM-LG.
        embed_dim: embedding dimension, which may differ from the teacher's (open_clip's ViT-S-16).
    """

    width: Annotated[int, COUNT] = 384
    heads: Annotated[int, COUNT] = 6
    depth: Annotated[int, COUNT] = 12
    embed_dim: Annotated[int, COUNT] = 384


@dataclass(frozen=True)
class VisionSettings(SettingsGroup, option="vision"):
    """Images that the vision tower takes. The command line sets all but `patch_size` from the data.

    Args:
        image_size: side of the square images, pixels (paper).
        patch_size: side of a patch, pixels (paper).
        image_mean: mean that the images are normalized with (CLIP). The teacher has to expect the same.
        image_std: standard deviation that the images are normalized with (CLIP).
    """

    image_size: Annotated[int, COUNT] = 224
    patch_size: Annotated[int, COUNT] = 16
    image_mean: Annotated[Three, FINITE] = OPENAI_DATASET_MEAN
    image_std: Annotated[Three, POSITIVE] = OPENAI_DATASET_STD


@dataclass(frozen=True)
class TextSettings(SettingsGroup, option="text"):
    """Token sequences that the text tower takes. The command line sets both from the data.

    Args:
        max_tokens: length of the token sequences (CLIP).
        vocab_size: number of tokens in the vocabulary (CLIP).
    """

    max_tokens: Annotated[int, COUNT] = 77
    vocab_size: Annotated[int, COUNT] = 49408


@dataclass(frozen=True)
class TeacherSettings(SettingsGroup, option="teacher"):
    """The CLIP whose logits are distilled.

    Args:
        model: name of one of open_clip's models (paper: OpenAI's ViT-B/16); null for a checkpoint of two towers.
        weights: a tag of open_clip's, which also selects QuickGELU; a folder or a file, as in `load_published`. The
            texts of a teacher with another tokenizer than CLIP's are encoded by that.
        distillation_weight: lambda (paper); 0 trains without a teacher.
        mask_same_text: whether a training without a teacher excludes other pairs of the same text from the negatives,
            like those of the same image.
    """

    model: str | None = "ViT-B-16"
    weights: str = "openai"
    distillation_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    mask_same_text: bool = True


@dataclass(frozen=True)
class OptimSettings(SettingsGroup, option="optim"):
    """AdamW with linear warm-up and cosine decay to 0.

    Args:
        learning_rate: peak learning rate (paper).
        warmup_steps: optimizer steps of warm-up (paper); a tenth of a run that is not longer than that.
        weight_decay: weight decay (paper); norms, biases, coefficients and the logit scale are exempt.
        betas: beta1 and beta2 (open_clip's for ViTs; the paper gives none).
        eps: epsilon (open_clip's for ViTs; the paper gives none).
    """

    learning_rate: Annotated[float, RATE] = 1e-3
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 10_000
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.98)
    eps: Annotated[float, POSITIVE] = 1e-6


@dataclass(frozen=True)
class MemorySettings(SettingsGroup, option="memory"):
    """Recomputation in the backward pass, which gives the loss of the whole batch in less memory.

    Args:
        micro_batch_size: pairs that pass the towers at a time; None: the whole batch.
        loss_rows: rows of the logits that are in memory at a time; None: all.
    """

    micro_batch_size: Annotated[int | None, COUNT] = None
    loss_rows: Annotated[int | None, COUNT] = None


@dataclass(frozen=True)
class EvaluationSettings(SettingsGroup, option="evaluation"):
    """Retrieval evaluation.

    Args:
        protocols: "karpathy5" ranks all captions of all images (five of each in Karpathy's splits), "paper" the first
            caption of each image. Metrics are logged under the name of their protocol.
    """

    protocols: tuple[Protocol, ...] = ("karpathy5", "paper")


@dataclass(frozen=True)
class ClassifierVisionSettings(SettingsGroup, option="vision"):
    """The vision tower of a classifier.

    Args:
        image_size: side of the square images, pixels (paper). The command line sets it from the data.
        patch_size: side of a patch, pixels (paper).
        width: token dimension (open_clip's ViT-S-16).
        heads: number of attention heads (open_clip's ViT-S-16).
        depth: number of layers (paper: 6, 8 or 12).
    """

    image_size: Annotated[int, COUNT] = 224
    patch_size: Annotated[int, COUNT] = 16
    width: Annotated[int, COUNT] = 384
    heads: Annotated[int, COUNT] = 6
    depth: Annotated[int, COUNT] = 12


@dataclass(frozen=True)
class ClassifierOptimSettings(OptimSettings):
    """AdamW with linear warm-up and cosine decay to 0; betas and epsilon are those of extraction.

    Args:
        learning_rate: peak learning rate (paper, appendix A.3).
        warmup_steps: optimizer steps of warm-up (paper, appendix A.3); a tenth of a run that is not longer than that.
        weight_decay: weight decay (paper, appendix A.3); vectors are exempt.
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 5_000
    weight_decay: float = 0.01


@dataclass(frozen=True)
class MapperSettings(SettingsGroup, option="mapper"):
    """The mapper from an image embedding to a prefix for the language model.

    Args:
        width: token dimension of the language model (GPT-2).
        prefix_length: tokens of the prefix (ClipCap's class; its published command has 40).
        clip_length: tokens of the mapper that the embedding is projected to (ClipCap's class, as above).
        depth: number of layers (ClipCap).
        heads: number of attention heads (ClipCap).
        mlp_ratio: hidden dimension of the MLPs over their width (ClipCap).
    """

    width: Annotated[int, COUNT] = 768
    prefix_length: Annotated[int, COUNT] = 10
    clip_length: Annotated[int, COUNT] = 10
    depth: Annotated[int, COUNT] = 8
    heads: Annotated[int, COUNT] = 8
    mlp_ratio: Annotated[float, POSITIVE] = 2.0


@dataclass(frozen=True)
class CaptioningOptimSettings(SettingsGroup, option="optim"):
    """AdamW with linear warm-up and linear decay to 0, as ClipCap.

    Args:
        learning_rate: peak learning rate (MM-LG, ClipCap).
        warmup_steps: optimizer steps of warm-up (MM-LG, ClipCap); a tenth of a run that is not longer than that.
        weight_decay: weight decay (neither paper gives one; 0 in the AdamW of ClipCap's code); norms and biases are
            exempt.
        betas: beta1 and beta2 (ClipCap's code).
        eps: epsilon (ClipCap's code).
    """

    learning_rate: Annotated[float, RATE] = 2e-5
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 5_000
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.999)
    eps: Annotated[float, POSITIVE] = 1e-6


@dataclass(frozen=True)
class GenerationSettings(SettingsGroup, option="generation"):
    """Beam search.

    Args:
        num_beams: number of beams (ClipCap).
        max_new_tokens: maximum length of a caption, its end included (ClipCap).
        stop_at_period: end a caption at its first full stop too, as ClipCap does.
    """

    num_beams: Annotated[int, COUNT] = 5
    max_new_tokens: Annotated[int, COUNT] = 67
    stop_at_period: bool = False


def learngene_sizes(towers: TowerSettings, vision: VisionSettings, text: TextSettings) -> LearngeneSizes:
    """Return the sizes of a student under the names of a learngene's file."""
    return LearngeneSizes(
        width=towers.width,
        heads=towers.heads,
        layers=towers.depth,
        embed_dim=towers.embed_dim,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        max_tokens=text.max_tokens,
        vocab_size=text.vocab_size,
    )
