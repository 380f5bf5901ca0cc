"""Settings of MM-LG's modules, with the source of each default."""

from dataclasses import dataclass

from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from ...callbacks.learngene.sizes import LearngeneSizes
from ...common.errors import UserError
from ..evaluation.ranking import Protocol

Three = tuple[float, float, float]


@dataclass(frozen=True)
class TowerSettings:
    """Sizes that both towers have in common, since they share blocks.

    Args:
        width: token dimension (open_clip's ViT-S-16).
        heads: number of attention heads (open_clip's ViT-S-16).
        depth: number of layers of each tower (paper); even for MM-LG.
        embed_dim: embedding dimension, which may differ from the teacher's (open_clip's ViT-S-16).
    """

    width: int = 384
    heads: int = 6
    depth: int = 12
    embed_dim: int = 384


@dataclass(frozen=True)
class VisionSettings:
    """Images that the vision tower takes. The command line sets all but `patch_size` from the data.

    Args:
        image_size: side of the square images, pixels (paper).
        patch_size: side of a patch, pixels (paper).
        image_mean: mean that the images are normalized with (CLIP). The teacher has to expect the same.
        image_std: standard deviation that the images are normalized with (CLIP).
    """

    image_size: int = 224
    patch_size: int = 16
    image_mean: Three = OPENAI_DATASET_MEAN
    image_std: Three = OPENAI_DATASET_STD


@dataclass(frozen=True)
class TextSettings:
    """Token sequences that the text tower takes. The command line sets both from the data.

    Args:
        max_tokens: length of the token sequences (CLIP).
        vocab_size: number of tokens in the vocabulary (CLIP).
    """

    max_tokens: int = 77
    vocab_size: int = 49408


@dataclass(frozen=True)
class TeacherSettings:
    """The CLIP whose logits are distilled.

    Args:
        model: name of one of open_clip's models (paper: OpenAI's ViT-B/16).
        weights: a tag of open_clip's, which also selects QuickGELU; a folder or a file, as in `load_published`.
        distillation_weight: lambda (paper); 0 trains without a teacher.
        mask_same_text: whether other pairs of the same text, like those of the same image, are no negatives in a
            training without a teacher.
    """

    model: str = "ViT-B-16"
    weights: str = "openai"
    distillation_weight: float = 1.0
    mask_same_text: bool = True

    def __post_init__(self) -> None:
        """Check the weight."""
        if self.distillation_weight < 0:
            raise UserError(
                f"Expected distillation_weight of at least 0, got {self.distillation_weight}: set 0 to train without a "
                "teacher."
            )


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with linear warm-up and cosine decay to 0.

    Args:
        learning_rate: peak learning rate (paper).
        warmup_steps: optimizer steps of warm-up (paper); a tenth of a run that is not longer than that.
        weight_decay: weight decay (paper); norms, biases, coefficients and the logit scale are exempt.
        betas: beta1 and beta2 (open_clip's for ViTs; the paper gives none).
        eps: epsilon (open_clip's for ViTs; the paper gives none).
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 10_000
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6


@dataclass(frozen=True)
class MemorySettings:
    """Recomputation in the backward pass, which gives the loss of the whole batch in the memory of a part.

    Args:
        micro_batch_size: pairs that pass the towers at a time; None: the whole batch.
        loss_rows: rows of the logits that are in memory at a time; None: all.
    """

    micro_batch_size: int | None = None
    loss_rows: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise UserError(f"Expected {name} of at least 1, or null for the whole batch, got {value}: change it.")


@dataclass(frozen=True)
class EvaluationSettings:
    """Retrieval evaluation.

    Args:
        protocols: "karpathy5" ranks all captions of all images (five of each in Karpathy's splits), "paper" the first
            caption of each image. Metrics are logged under the name of their protocol.
    """

    protocols: tuple[Protocol, ...] = ("karpathy5", "paper")


@dataclass(frozen=True)
class ClassifierVisionSettings:
    """The vision tower of a classifier.

    Args:
        image_size: side of the square images, pixels (paper). The command line sets it from the data.
        patch_size: side of a patch, pixels (paper).
        width: token dimension (open_clip's ViT-S-16).
        heads: number of attention heads (open_clip's ViT-S-16).
        depth: number of layers (paper: 6, 8 or 12).
    """

    image_size: int = 224
    patch_size: int = 16
    width: int = 384
    heads: int = 6
    depth: int = 12


@dataclass(frozen=True)
class ClassifierOptimSettings:
    """AdamW with linear warm-up and cosine decay to 0.

    Args:
        learning_rate: peak learning rate (paper, appendix A.3).
        warmup_steps: optimizer steps of warm-up (paper, appendix A.3); a tenth of a run that is not longer than that.
        weight_decay: weight decay (paper, appendix A.3); vectors are exempt.
        betas: beta1 and beta2 (as in extraction; the paper gives none).
        eps: epsilon (as in extraction; the paper gives none).
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 5_000
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6


@dataclass(frozen=True)
class MapperSettings:
    """The mapper from an image embedding to a prefix for the language model.

    Args:
        width: token dimension of the language model (GPT-2).
        prefix_length: tokens of the prefix (ClipCap's class; its published command has 40).
        clip_length: tokens of the mapper that the embedding is projected to (ClipCap's class, as above).
        depth: number of layers (ClipCap).
        heads: number of attention heads (ClipCap).
        mlp_ratio: hidden dimension of the MLPs over their width (ClipCap).
    """

    width: int = 768
    prefix_length: int = 10
    clip_length: int = 10
    depth: int = 8
    heads: int = 8
    mlp_ratio: float = 2.0


@dataclass(frozen=True)
class CaptioningOptimSettings:
    """AdamW with linear warm-up and linear decay to 0, as ClipCap.

    Args:
        learning_rate: peak learning rate (MM-LG, ClipCap).
        warmup_steps: optimizer steps of warm-up (MM-LG, ClipCap); a tenth of a run that is not longer than that.
        weight_decay: weight decay (neither paper gives one; 0 in the AdamW of ClipCap's code); norms and biases are
            exempt.
        betas: beta1 and beta2 (ClipCap's code).
        eps: epsilon (ClipCap's code).
    """

    learning_rate: float = 2e-5
    warmup_steps: int = 5_000
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6


@dataclass(frozen=True)
class GenerationSettings:
    """Beam search.

    Args:
        num_beams: number of beams (ClipCap).
        max_new_tokens: maximum length of a caption, its end included (ClipCap).
        stop_at_period: end a caption at its first full stop too, as ClipCap does.
    """

    num_beams: int = 5
    max_new_tokens: int = 67
    stop_at_period: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_beams", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"Expected {name} of at least 1, got {getattr(self, name)}: change it.")


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
