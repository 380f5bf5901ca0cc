"""Settings of SHRe and of its image classifier.

Defaults come from T. Cares' master's thesis (2024) and its listings; "code" is the code published with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import nn

from ...common.errors import UserError
from ...common.ranges import (
    BELOW_ONE,
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    RATE,
    SHARE,
    Range,
    SettingsGroup,
)
from ..networks.clip.pair import check_image_network
from ..networks.clip.text_encoder import Pooling

Three = tuple[float, float, float]


@dataclass(frozen=True)
class TeacherSettings(SettingsGroup, option="teacher"):
    """The teacher, and the normalization of its images.

    Args:
        name: name of a classifier as in `build_classifier`, "timm/..." for timm's models (listing 2: ResNet-50-A1); for
            embeddings, a vision transformer of timm's.
        weights: a file; the folder of a run of `CoCoRDModule` that trained it; or the name of the library's weights.
        mean: mean of the images that the teacher was trained with. None: timm's, for its models; for others, the same
            as the data's.
        std: standard deviation that belongs to `mean`.
        image_mean: mean of the data's images. None: that of the datamodule's `preprocessing`.
        image_std: standard deviation that belongs to `image_mean`.
        target: "posterior": class posterior of a supervised teacher (listing 2). "embedding": class token of a
            self-supervised one, contrasted with those of other images (thesis: S-SMKE with contrastive distillation).
        temperature: temperature of the contrast with embeddings; it is not learned (code: CLIP's initial value, in no
            parameter group).
        queue_size: embeddings of earlier batches that are negatives too (thesis: a memory bank of 65,536). 0: none. (A
            memory bank of the student's own embeddings made the thesis' training fail.)
        network: a network of your own that replaces `name` and `weights`, and states the normalization of its images
            (docs/own_teachers.md).
    """

    name: str = "timm/resnet50"
    weights: str | None = "a1_in1k"
    mean: Annotated[Three | None, FINITE] = None
    std: Annotated[Three | None, POSITIVE] = None
    image_mean: Annotated[Three | None, FINITE] = None
    image_std: Annotated[Three | None, POSITIVE] = None
    target: Literal["posterior", "embedding"] = "posterior"
    temperature: Annotated[float, POSITIVE] = 0.07
    queue_size: Annotated[int, NOT_NEGATIVE] = 0
    network: nn.Module | None = None


@dataclass(frozen=True)
class ViTSettings(SettingsGroup, option="vision"):
    """An image encoder, which is a vision transformer.

    Args:
        image_size: side S of the square images, in pixels. The command line sets it from the data.
        patch_size: side of a patch, in pixels (ViT-B/16).
        width: width D of a token (ViT-B).
        depth: number of blocks (thesis).
        heads: number of attention heads (ViT-B).
        post_norm: normalize after attention and MLP as Data2Vec 2.0 (thesis) instead of before them.
    """

    image_size: Annotated[int, COUNT] = 224
    patch_size: Annotated[int, COUNT] = 16
    width: Annotated[int, COUNT] = 768
    depth: Annotated[int, COUNT] = 6
    heads: Annotated[int, COUNT] = 12
    post_norm: bool = True


@dataclass(frozen=True)
class VisionSettings(ViTSettings):
    """The image encoder.

    Args:
        image_size: side S of the square images, in pixels. The command line sets it from the data.
        patch_size: side of a patch, in pixels (ViT-B/16).
        width: width D of a token, also in the text encoder (ViT-B, BERT-base).
        depth: number of blocks (thesis).
        heads: number of attention heads, also in the text encoder (ViT-B, BERT-base).
        post_norm: normalize after attention and MLP as Data2Vec 2.0 (thesis) instead of before them.
        weights: timm model or file with the initial weights; a deeper encoder gives its first blocks (thesis: Data2Vec
            2.0's `base_imagenet.pt`). With a name: "pretrained", those that timm downloads for it; a `.safetensors`,
            `.pth` or `.bin` file with timm's names; or a checkpoint or an export of this package with the same network.
            None: random.
        name: any image network of timm, such as `tf_efficientnet_lite0`, in place of a vision transformer of these
            sizes; `width` and `heads` are then those of the shared encoder, to which its outputs are projected.

    Raises:
        UserError: If timm has no such network.
    """

    weights: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_image_network(self.name, "model.vision.name")


@dataclass(frozen=True)
class TextSettings(SettingsGroup, option="text"):
    """The text encoder: a BERT of the width and heads of the image encoder, or any encoder of transformers by name.

    Args:
        vocab_size: largest vocabulary (BERT, uncased); a tokenizer trained for the run may be smaller. The command line
            sets it from the data.
        max_tokens: maximum number of tokens of a caption (listing 2: 64). The command line sets it from the data.
        depth: number of layers (thesis).
        dropout: dropout probability (BERT).
        weights: hub name or folder of a BERT, whose first layers are the initial weights (thesis: "bert-base-uncased").
            With a name: "pretrained", those of `name`; another folder or name of the same network; or a checkpoint or
            an export of this package with the same network. None: random.
        name: a local folder, or a name on the Hugging Face hub, of an encoder of transformers and its tokenizer, in
            place of a BERT of `depth`; its outputs are projected to the width of the shared encoder.
        tokenizer: folder or name of the tokenizer of `name`; None means `name`.
        pooling: how the tokens' outputs of `name` become the first token of the shared encoder, as in `TextTower`.
        prefix: text before each text, which some encoders need (E5: "query: ").
        pad_token_id: id of the padding; that of `name` replaces it.
        config: configuration of the encoder in place of that of `name`; checkpoints have it, and need no other file.
    """

    vocab_size: Annotated[int, COUNT] = 30522
    max_tokens: Annotated[int, COUNT] = 64
    depth: Annotated[int, COUNT] = 6
    dropout: Annotated[float, BELOW_ONE] = 0.1
    weights: str | None = None
    name: str | None = None
    tokenizer: str | None = None
    pooling: Pooling | None = None
    prefix: str = ""
    pad_token_id: Annotated[int, NOT_NEGATIVE] = 0
    config: dict[str, Any] | None = None

    @property
    def special_token_ids(self) -> dict[str, int]:
        """Id of the padding, the one that the encoder must know."""
        return {"pad": self.pad_token_id}


@dataclass(frozen=True)
class KLSettings(SettingsGroup, option="kl"):
    """Divergence from the teacher's posterior, or contrast with its embeddings.

    Args:
        weight: weight of both divergences together, or of the contrast (listing 2: 1). 0 needs no teacher.
        image_share: share of the weight for the image; the caption has the rest (listing 2: 1/2).
        temperature: temperature of both posteriors (thesis: 1); not of the contrast.
    """

    weight: Annotated[float, NOT_NEGATIVE] = 1.0
    image_share: Annotated[float, SHARE] = 0.5
    temperature: Annotated[float, POSITIVE] = 1.0


@dataclass(frozen=True)
class ContrastSettings(SettingsGroup, option="contrast"):
    """Image-text contrast of the shared encoder's results.

    Args:
        weight: weight of the mean over the contrasted results (listing 2: 1).
        layers: results to contrast, of "h1", "h2" and "h3". None: all of "mlp"; h2 of "transformer"; h1 and h2 of
            "s_smke".
        temperature: initial temperature of each contrast; it is learned (CLIP).
        max_logit_scale: upper bound of the inverse temperature (CLIP).
        mask_same_image: exclude other captions of an image from its negatives (thesis: they count).
        mask_same_text: exclude other pairs of the same caption from its negatives (thesis: they count).
    """

    weight: Annotated[float, NOT_NEGATIVE] = 1.0
    layers: list[str] | None = None
    temperature: Annotated[float, POSITIVE] = 0.07
    max_logit_scale: Annotated[float, Range(least=1)] = 100.0
    mask_same_image: bool = True
    mask_same_text: bool = True


@dataclass(frozen=True)
class EvaluationSettings(SettingsGroup, option="evaluation"):
    """Retrieval.

    Args:
        features: feature space of `predict` and of `ZeroShotClassification`: "h2" (code) or "h3" (thesis).
    """

    features: str = "h2"


@dataclass(frozen=True)
class OptimSettings(SettingsGroup, option="optim"):
    """AdamW with a warm-up from 0 and half a cosine to 0 (thesis).

    Vectors, tokens, positions and embeddings do not decay.

    Args:
        learning_rate: peak learning rate, per 256 pairs of the global batch.
        warmup_share: share of the optimizer steps in which the learning rate rises.
        weight_decay: weight decay.
        betas: beta1 and beta2.
        eps: epsilon.
    """

    learning_rate: Annotated[float, RATE] = 1e-4
    warmup_share: Annotated[float, BELOW_ONE] = 0.1
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.98)
    eps: Annotated[float, POSITIVE] = 1e-6


@dataclass(frozen=True)
class MemorySettings(SettingsGroup, option="memory"):
    """Less memory for the same loss.

    Args:
        micro_batch_size: pairs that pass through the encoders at a time; activations are recomputed in the backward
            pass. None: all at once.
        loss_rows: rows of the logits that are held at a time, recomputed in the backward pass. None: all.
    """

    micro_batch_size: Annotated[int | None, COUNT] = None
    loss_rows: Annotated[int | None, COUNT] = None


@dataclass(frozen=True)
class MixSettings(SettingsGroup, option="mix"):
    """Mixup, CutMix and label smoothing (thesis).

    Args:
        mixup: alpha of mixup; 0 disables it.
        cutmix: alpha of CutMix; 0 disables it.
        probability: probability of mixing a batch.
        switch_probability: probability of CutMix for a mixed batch, where both are enabled.
        label_smoothing: share of the label that is spread over all classes.
    """

    mixup: Annotated[float, NOT_NEGATIVE] = 0.8
    cutmix: Annotated[float, NOT_NEGATIVE] = 1.0
    probability: Annotated[float, SHARE] = 0.9
    switch_probability: Annotated[float, SHARE] = 0.5
    label_smoothing: Annotated[float, SHARE] = 0.1


@dataclass(frozen=True)
class ProbeOptimSettings(SettingsGroup, option="optim"):
    """AdamW with a warm-up from 0 and half a cosine to 0 (thesis). Vectors, the class token and positions do not decay.

    Args:
        learning_rate: peak learning rate of the head.
        warmup_share: share of the optimizer steps in which the learning rate rises.
        weight_decay: weight decay.
        betas: beta1 and beta2.
        eps: epsilon.
        layer_decay: multiplicative learning-rate decay from each block to the one below it in fine-tuning; the
            embeddings of an encoder of L blocks have the head's rate times its power L + 1 (thesis: 0.81 on ImageNet,
            0.75 on CIFAR). 1 disables it.
    """

    learning_rate: Annotated[float, RATE] = 1e-3
    warmup_share: Annotated[float, BELOW_ONE] = 0.1
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.999)
    eps: Annotated[float, POSITIVE] = 1e-8
    layer_decay: Annotated[float, POSITIVE_SHARE] = 0.81


def check_settings(
    teacher: TeacherSettings,
    kl: KLSettings,
    contrast: ContrastSettings,
    evaluation: EvaluationSettings,
    results: Sequence[str],
) -> None:
    """Check settings of `SHReModule`; `results` are the names of the shared encoder's results, in order.

    Raises:
        UserError: If settings do not fit together, or name a result that the shared encoder does not have.
    """
    if teacher.queue_size and teacher.target != "embedding":
        raise UserError(
            f"Expected teacher.target embedding with a queue, got {teacher.target} with teacher.queue_size "
            f"{teacher.queue_size}: set one of them."
        )
    if teacher.target == "embedding" and kl.image_share != 0.5:
        raise UserError(
            f"Expected kl.image_share 0.5 with embeddings, whose contrast weights both alike, got {kl.image_share}: "
            "correct it."
        )
    if not kl.weight and not contrast.weight:
        raise UserError("Expected a loss, got 0 for kl.weight and contrast.weight: raise one of them.")
    layers = contrast.layers
    if layers is not None and (not layers or not set(layers) <= set(results) or len(set(layers)) < len(layers)):
        raise UserError(
            f"Expected some of the shared encoder's results {', '.join(results)} in contrast.layers, got {layers}: "
            "correct it."
        )
    if evaluation.features not in (results[0], results[-1]):
        raise UserError(
            f"Expected {results[0]!r} or {results[-1]!r} as evaluation.features, got {evaluation.features!r}: correct "
            "it."
        )
