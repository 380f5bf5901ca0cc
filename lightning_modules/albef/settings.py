"""ALBEF's settings, in groups. "Section" is one of the paper, "the authors" are github.com/salesforce/ALBEF."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from ...common.errors import UserError
from ...common.ranges import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    SHARE,
    Range,
    SettingsGroup,
    check_heads,
    check_patches,
)
from ..networks.vit import sizes_of_vit


@dataclass(frozen=True)
class VisionSettings(SettingsGroup, option="vision"):
    """The image encoder: ViT-B/16 at 256 pixels (section 3.1).

    Args:
        image_size: side of the square images in pixels.
        patch_size: side of a patch in pixels; divides `image_size`.
        width: embedding dimension V of the image tokens.
        depth: number of blocks.
        heads: attention heads.
        mlp_ratio: hidden width of the MLP over `width`.
        weights: timm model name or file of the initial weights (the paper: "deit_base_patch16_224.fb_in1k"), or a
            checkpoint or an export of this package with the same encoder; with a `name` also "pretrained", those that
            timm downloads for it. None means random.
        name: vision transformer of timm with a class token, such as `vit_small_patch16_224`, whose sizes replace
            `patch_size`, `width`, `depth`, `heads` and `mlp_ratio`.

    Raises:
        UserError: If sizes do not fit together, or timm's network is another or has another size than a given one.
    """

    image_size: Annotated[int, COUNT] = 256
    patch_size: Annotated[int, COUNT] = 16
    width: Annotated[int, COUNT] = 768
    depth: Annotated[int, COUNT] = 12
    heads: Annotated[int, COUNT] = 12
    mlp_ratio: Annotated[float, POSITIVE] = 4.0
    weights: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for size, value in ({} if self.name is None else sizes_of_vit(self.name, "model.vision.name")).items():
            given = getattr(self, size)
            if given not in (value, getattr(VisionSettings, size)):
                raise UserError(f"Expected vision.{size} {value:g}, that of {self.name}, got {given:g}: leave it out.")
            object.__setattr__(self, size, value)
        check_patches(self.image_size, self.patch_size)
        check_heads(self.width, self.heads)


@dataclass(frozen=True)
class TextSettings(SettingsGroup, option="text"):
    """The text and fusion encoder, a BERT-base split into 6 + 6 layers, and its masked words (section 3.1).

    Args:
        vocab_size: largest number of tokens in the vocabulary, reduced to the tokenizer's where the run trains one. The
            command line takes it from the data.
        max_positions: maximum number of tokens of a text, one per position embedding.
        width: embedding dimension D of the text tokens.
        heads: attention heads.
        ffn_width: hidden width of the feed-forward networks.
        depth: layers of the text encoder, below the fusion.
        fusion_depth: layers of the fusion encoder, with cross-attention to the image.
        dropout: dropout probability of hidden states and of attention weights; the image encoder has no dropout.
        weights: hub name or folder of the BERT with the initial weights (the paper: "bert-base-uncased"). None means
            random. A folder sets vocabulary, positions, width, heads, feed-forward width, depths and special token ids
            (`weights.sizes_of_bert`), and the data's tokenizer.
        mask_probability: share of the words that is masked.
        pad_token_id: the tokenizer's padding token.
        cls_token_id: the tokenizer's [CLS] token.
        sep_token_id: the tokenizer's [SEP] token.
        mask_token_id: the tokenizer's [MASK] token.
    """

    vocab_size: Annotated[int, COUNT] = 30522
    max_positions: Annotated[int, COUNT] = 512
    width: Annotated[int, COUNT] = 768
    heads: Annotated[int, COUNT] = 12
    ffn_width: Annotated[int, COUNT] = 3072
    depth: Annotated[int, COUNT] = 6
    fusion_depth: Annotated[int, COUNT] = 6
    dropout: Annotated[float, BELOW_ONE] = 0.1
    weights: str | None = None
    mask_probability: Annotated[float, SHARE] = 0.15
    pad_token_id: Annotated[int, NOT_NEGATIVE] = 0
    cls_token_id: Annotated[int, NOT_NEGATIVE] = 101
    sep_token_id: Annotated[int, NOT_NEGATIVE] = 102
    mask_token_id: Annotated[int, NOT_NEGATIVE] = 103

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        if max(self.special_token_ids.values()) >= self.vocab_size:
            raise UserError(
                f"Expected special token ids below text.vocab_size {self.vocab_size}, got {self.special_token_ids}: "
                "take both from the tokenizer."
            )

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a text."""
        return self.max_positions

    @property
    def special_token_ids(self) -> dict[str, int]:
        """Ids of the special tokens, under the names that the datamodules use."""
        return {name: getattr(self, f"{name}_token_id") for name in ("pad", "cls", "sep", "mask")}


@dataclass(frozen=True)
class MomentumSettings(SettingsGroup, option="momentum"):
    """The momentum teacher and its soft targets (eqs. 6 and 7).

    Args:
        momentum: momentum of the teacher's moving average.
        teacher_dropout: whether BERT's dropout stays on in the teacher, as in the authors' code.
        alpha: weight of the soft targets.
        alpha_warmup_epochs: epochs over which alpha rises linearly from 0, batch by batch.
        alpha_by_accuracy: whether alpha is, besides, multiplied by the teacher's accuracy among the keys of a batch
            above chance, a running mean: the targets of an untrained teacher then have no weight (not of the paper,
            whose encoders are trained before; default: its constant alpha).
        distill_itc: whether the contrastive targets are mixed with the teacher's (eq. 6).
        distill_mlm: whether the masked words are mixed with the teacher's (eq. 7).
    """

    momentum: Annotated[float, SHARE] = 0.995
    teacher_dropout: bool = False
    alpha: Annotated[float, SHARE] = 0.4
    alpha_warmup_epochs: Annotated[float, NOT_NEGATIVE] = 1.0
    alpha_by_accuracy: bool = False
    distill_itc: bool = True
    distill_mlm: bool = True

    def teacher_text(self, text: TextSettings) -> TextSettings:
        """Return the settings of the teacher's BERT: the student's, without dropout unless `teacher_dropout` is set."""
        return text if self.teacher_dropout else replace(text, dropout=0.0)


@dataclass(frozen=True)
class ContrastSettings(SettingsGroup, option="contrast"):
    """Image-text contrastive learning (section 3.2).

    Args:
        embed_dim: embedding dimension E of the contrastive space.
        queue_size: keys kept for each modality (the paper: 65536); 0 contrasts with the keys of the batch alone.
        queue_start: "empty" hides slots until they are filled; "random" starts with random unit vectors as negatives,
            as the authors do.
        temperature: initial value of the learnable temperature.
        temperature_min: lower bound of the temperature, applied after each optimizer step (the authors').
        temperature_max: upper bound of the temperature, applied after each optimizer step (the authors').
        positives: "image_id" counts every key of the same image as a match and never draws one as a hard negative;
            "diagonal" only the pair itself, as the authors' pre-training does.
        match_same_text: whether keys of the same text are matches, too, unless `positives` is "diagonal" (the authors:
            they are negatives).
        key_columns: "global" contrasts with the teacher's keys of all processes, so that N processes give the loss of
            one process with N times the batch; "local" with the keys of this process, as the authors do.
        negative_rows: rows of the global batch among which hard negatives are drawn, a divisor of the batch of a
            process; None for the batch of a process, as the authors do. With a number, a run that goes on with another
            number of processes draws the same negatives.
        itc: whether image-text contrastive learning is one of the losses. Without it projections and temperature are
            not trained, retrieval by contrast alone is at chance, and the negatives of matching must be random.
        negatives: "hard" draws the negatives of image-text matching by their similarity (the paper), "random" evenly;
            "ramped" multiplies the similarities over the temperature by the student's accuracy among the keys of a
            batch above chance, a running mean, so that negatives become hard as the similarities learn (not of the
            paper).
    """

    embed_dim: Annotated[int, COUNT] = 256
    queue_size: Annotated[int, NOT_NEGATIVE] = 65536
    queue_start: Literal["empty", "random"] = "empty"
    temperature: Annotated[float, POSITIVE] = 0.07
    temperature_min: Annotated[float, POSITIVE] = 0.001
    temperature_max: Annotated[float, POSITIVE] = 0.5
    positives: Literal["image_id", "diagonal"] = "image_id"
    match_same_text: bool = True
    key_columns: Literal["global", "local"] = "global"
    negative_rows: Annotated[int | None, Range(least=2)] = None
    itc: bool = True
    negatives: Literal["hard", "random", "ramped"] = "hard"

    def by_process(self) -> list[str]:
        """Return a clause for each result that depends on how the global batch is divided among the processes."""
        clauses = []
        if self.negative_rows is None:
            clauses.append("hard negatives are drawn from the batch of each process (see contrast.negative_rows)")
        if self.key_columns == "local":
            clauses.append("features are contrasted with the keys of each process (contrast.key_columns)")
        return clauses

    def __post_init__(self) -> None:
        self.check_order("temperature_min", "temperature")
        self.check_order("temperature", "temperature_max")
        if not self.itc and self.negatives != "random":
            raise UserError(
                "Expected contrast.negatives: random without contrast.itc, which trains the similarities that hard "
                f"negatives are drawn by, got {self.negatives}: set it."
            )


@dataclass(frozen=True)
class OptimSettings(SettingsGroup, option="optim"):
    """AdamW and its learning rate.

    Args:
        learning_rate: peak learning rate.
        min_learning_rate: learning rate at the last step.
        warmup_learning_rate: learning rate at the first step (the authors').
        warmup_steps: optimizer steps of warm-up (the paper: 1000; the authors' configuration: 2000).
        lr_schedule: "cosine" is linear warm-up and a cosine over all steps; "official" is the authors' staircase.
        weight_decay: weight decay; norms, biases and the temperature have none.
        decay_temperature: whether the temperature has weight decay, as in the authors' code.
        betas: beta1 and beta2 (the authors').
    """

    learning_rate: Annotated[float, RATE] = 1e-4
    min_learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-5
    warmup_learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-5
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 1000
    lr_schedule: Literal["cosine", "official"] = "cosine"
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.02
    decay_temperature: bool = False
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.999)

    def __post_init__(self) -> None:
        self.check_order("min_learning_rate", "learning_rate")
        self.check_order("warmup_learning_rate", "learning_rate")


@dataclass(frozen=True)
class MemorySettings(SettingsGroup, option="memory"):
    """Less activation memory for more computation; neither setting changes a loss.

    Args:
        micro_batch_size: pairs that pass through the networks at a time, with activations recomputed in the backward
            pass. None: the whole batch at once.
        activation_checkpointing: whether every block of the student recomputes its activations in the backward pass.
    """

    micro_batch_size: Annotated[int | None, COUNT] = None
    activation_checkpointing: bool = False


# The downstream tasks: the groups above with the defaults of the authors' configurations


@dataclass(frozen=True)
class TaskVisionSettings(VisionSettings):
    """The image encoder, at 384 pixels (section 5); see `VisionSettings`."""

    image_size: int = 384


@dataclass(frozen=True)
class TaskMomentumSettings(MomentumSettings):
    """The momentum teacher of a task and its soft targets; see `MomentumSettings`. `alpha_by_accuracy` has no effect.

    Args:
        distill: whether there are a teacher and soft targets. False builds no teacher.
        start: "weights" starts the teacher from the loaded weights; "random" starts it, where the loaded weights have
            no teacher, from the random weights before them, averaged once with the loaded ones, as the authors'
            fine-tuning for NLVR2 does.
    """

    distill: bool = True
    start: Literal["weights", "random"] = "weights"


@dataclass(frozen=True)
class EntailmentMomentumSettings(TaskMomentumSettings):
    """The momentum teacher of visual entailment, whose alpha is constant; see `TaskMomentumSettings`."""

    alpha_warmup_epochs: float = 0.0


@dataclass(frozen=True)
class TaskOptimSettings(OptimSettings):
    """AdamW and its learning rate; see `OptimSettings`. `decay_temperature` has no effect."""

    learning_rate: float = 2e-5
    min_learning_rate: float = 1e-6
    warmup_steps: int = 100


@dataclass(frozen=True)
class AssignmentOptimSettings(TaskOptimSettings):
    """AdamW and its learning rate in text assignment; see `OptimSettings`."""

    min_learning_rate: float = 1e-5


@dataclass(frozen=True)
class VQAOptimSettings(TaskOptimSettings):
    """AdamW and its learning rate in visual question answering; see `OptimSettings`."""

    warmup_steps: int = 400


@dataclass(frozen=True)
class AnswerSettings(SettingsGroup, option="answers"):
    """How a question is answered (section 5, and the authors' code).

    Args:
        how: "rank" ranks the data's list of answers, "generate" writes an answer by beam search; without a list,
            answers are always written.
        candidates: answers of the list that remain after the first token is scored.
        first_token_twice: whether the log-probability of the first token counts twice, as in the authors' code.
        block: tokens of answers that are scored at a time. At the paper's sizes a block of 4096 takes 1.0 GB for the
            head and 0.2 GB for the decoder's layers.
        beams: beams of the search.
        max_tokens: longest written answer in tokens, its end included.
        top: number of best answers that are reported with their probabilities.
    """

    how: Literal["rank", "generate"] = "rank"
    candidates: Annotated[int, COUNT] = 128
    first_token_twice: bool = False
    block: Annotated[int, COUNT] = 4096
    beams: Annotated[int, COUNT] = 3
    max_tokens: Annotated[int, COUNT] = 10
    top: Annotated[int, COUNT] = 5
