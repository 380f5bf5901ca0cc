"""ALBEF: align before fuse (Li et al., NeurIPS 2021, arXiv 2107.07651).

A ViT and the lower half of a BERT are aligned by a contrastive loss before the upper half fuses them by
cross-attention; a momentum copy of the whole model supplies soft targets and the keys of the queues, because captions
from the web do not quite say what an image shows.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ...callbacks import (
    EMACallback,
    EMAPair,
    FeatureQueue,
    QueueCallback,
    RetrievalPredictionWriter,
    StepSeedCallback,
    missing_callbacks,
)
from ...callbacks.distributed.collectives import all_reduce_sum, gather, rank, world_size
from ..base.clamped import ClampedParameters
from ..base.data_sizes import DataSizes
from ..base.sharding import shard
from ..base.vocabulary import TextTower, TrainedVocabulary
from ..evaluation.reranking import RerankSettings
from ..evaluation.retrieval import Batch, RerankScore, RetrievalEvaluation, RetrievalModule
from ..memory import in_slices
from ..networks.bert import bert_config
from ..networks.precision import at_least_float32
from ..networks.vit_weights import load_vision_weights
from ..optim.clipping import ClippedFusedGradients
from ..optim.groups import weight_decay_groups
from ..optim.layout import lay_out_moments
from ..optim.schedules import steps_of_run
from . import draws, gradcam
from .losses import contrastive_targets, itc_loss, itm_loss, mlm_loss
from .network import ALBEFNetwork
from .pretrained import load_folder, load_trained, preprocessing_of_source, save_folder
from .schedule import learning_rate
from .weights import load_text_weights


class _Encoded(NamedTuple):
    """One model's view of a batch before fusion."""

    image_tokens: Tensor  # [B, N, V]
    text_states: Tensor  # [B, L, D]
    masked_states: tuple[Tensor, ...]  # one [B, L, D] of the masked texts, or nothing where none are masked
    image_features: Tensor  # [B, E]
    text_features: Tensor  # [B, E]


class _Keys(NamedTuple):
    """What is contrasted with and goes into the queues, of this process or of all."""

    image: Tensor  # [n, E]
    text: Tensor  # [n, E]
    id: Tensor  # long [n]: of the image


class ALBEFModule(ClampedParameters, ClippedFusedGradients, TrainedVocabulary, RetrievalModule):
    """ALBEF: image-text contrast, image-text matching and, in pre-training, masked language modelling.

    Sizes default to the paper's (ViT-B/16 at 256 px, BERT-base split 6 + 6). Where the authors' code and a better
    behaviour differ, the default is the better one; `configs/albef/official.yaml` sets all of theirs.

    Args:
        image_size: side of the square image in pixels.
        patch_size: side of a patch in pixels.
        vision_width: width of the ViT.
        vision_depth: number of ViT blocks.
        vision_heads: attention heads of the ViT.
        vision_mlp_ratio: hidden width of the ViT's MLP over its width.
        vocab_size: most words of the tokenizer, and as many as it has where a run trains it. The command line sets it
            from the data's.
        max_positions: longest text in tokens that has a position embedding.
        text_width: width of BERT.
        text_heads: attention heads of BERT.
        text_ffn_width: hidden width of BERT's feed-forward part.
        text_layers: layers below the fusion.
        fusion_layers: layers with cross-attention to the image.
        dropout: dropout probability of BERT, on hidden states and on attention; the ViT has none.
        embed_dim: width of the contrastive space.
        vision_weights: timm model name or file that the image encoder starts from (the paper:
            "deit_base_patch16_224.fb_in1k"). None means random.
        text_weights: hub name or folder of the BERT that text and fusion encoder start from (the paper:
            "bert-base-uncased"). None means random.
        weights: a trained ALBEF that student and teacher start from: a checkpoint of the authors or of ours, or the
            folder of an export. Takes the place of `vision_weights` and `text_weights`.
        mlm: whether words are masked and predicted. Fine-tuning for retrieval goes without, and without the head.
        queue_size: number of keys kept for each modality (section 3.5).
        queue_start: "empty" hides slots until they are filled; "random" starts with random unit vectors as negatives,
            as the authors do.
        momentum: momentum of the teacher's moving average (section 3.5).
        teacher_dropout: whether BERT's dropout stays on in the teacher, as in the authors' code.
        alpha: weight of the teacher's soft targets (section 3.5).
        alpha_warmup_epochs: epochs over which alpha rises from 0, step by step.
        temperature: start of the learnable temperature.
        temperature_min: the temperature is clamped to at least this after each optimizer step.
        temperature_max: the temperature is clamped to at most this after each optimizer step.
        positives: "image_id" counts every key of the same image as a match and never draws one as a hard negative;
            "diagonal" only the pair itself, as the authors' pre-training does.
        key_columns: "global" contrasts with the teacher's keys of all processes, so that N processes give the loss of
            one with N times the batch; "local" with this process's alone, as the authors do.
        mask_probability: share of the words that is masked.
        pad_token_id: id of the tokenizer's padding token.
        cls_token_id: id of the tokenizer's [CLS] token.
        sep_token_id: id of the tokenizer's [SEP] token.
        mask_token_id: id of the tokenizer's [MASK] token.
        learning_rate: learning rate at its peak (section 3.5).
        min_learning_rate: learning rate at the last step.
        warmup_learning_rate: learning rate at the first step.
        warmup_steps: optimizer steps of warm-up (the paper says 1000, the authors' configuration 2000).
        lr_schedule: "cosine" is linear warm-up and a cosine over all steps; "official" is the authors' staircase.
        weight_decay: weight decay of AdamW (section 3.5); norms, biases and the temperature are spared.
        decay_temperature: whether the temperature is decayed too, as in the authors' code.
        betas: beta1 and beta2 of AdamW; torch's default, as with the authors.
        micro_batch_size: pairs that go through the networks at a time, activations computed again in the backward
            pass: the memory of a small batch for the loss of the whole one, exactly. None: all at once.
        activation_checkpointing: whether every block of the student computes its activations again in the backward
            pass, which costs one more forward pass and keeps one block's activations.
        match_equal_texts: whether retrieval evaluation counts equal captions of other images as matches.
        rerank_k: candidates by contrast that the matching head re-orders (the authors: 128 for Flickr30k, 256 for
            COCO); 0 leaves re-ranking out.
        rerank_on: "test" re-ranks in `test` and `predict`, "always" in validation too.
        rerank_score: "itm" orders by the logit of a match alone, as the authors do; "itm+itc" adds the cosine,
            "itm+itc_logits" the cosine over the temperature.
        rerank_memory_gib: main memory in GiB that a process may use for image tokens, and again for text states; what
            goes beyond is kept in a temporary file.

    Raises:
        ValueError: for sizes that do not fit together, a temperature outside its bounds, or two sources of weights.
    """

    def __init__(
        self,
        image_size: int = 256,
        patch_size: int = 16,
        vision_width: int = 768,
        vision_depth: int = 12,
        vision_heads: int = 12,
        vision_mlp_ratio: float = 4.0,
        vocab_size: int = 30522,
        max_positions: int = 512,
        text_width: int = 768,
        text_heads: int = 12,
        text_ffn_width: int = 3072,
        text_layers: int = 6,
        fusion_layers: int = 6,
        dropout: float = 0.1,
        embed_dim: int = 256,
        vision_weights: str | None = None,
        text_weights: str | None = None,
        weights: str | None = None,
        mlm: bool = True,
        queue_size: int = 65536,
        queue_start: Literal["empty", "random"] = "empty",
        momentum: float = 0.995,
        teacher_dropout: bool = False,
        alpha: float = 0.4,
        alpha_warmup_epochs: float = 1.0,
        temperature: float = 0.07,
        temperature_min: float = 0.001,
        temperature_max: float = 0.5,
        positives: Literal["image_id", "diagonal"] = "image_id",
        key_columns: Literal["global", "local"] = "global",
        mask_probability: float = 0.15,
        pad_token_id: int = 0,
        cls_token_id: int = 101,
        sep_token_id: int = 102,
        mask_token_id: int = 103,
        learning_rate: float = 1e-4,
        min_learning_rate: float = 1e-5,
        warmup_learning_rate: float = 1e-5,
        warmup_steps: int = 1000,
        lr_schedule: Literal["cosine", "official"] = "cosine",
        weight_decay: float = 0.02,
        decay_temperature: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        micro_batch_size: int | None = None,
        activation_checkpointing: bool = False,
        match_equal_texts: bool = False,
        rerank_k: int = 128,
        rerank_on: Literal["never", "test", "always"] = "test",
        rerank_score: RerankScore = "itm",
        rerank_memory_gib: float = 8.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if weights is not None and (vision_weights is not None or text_weights is not None):
            raise ValueError(
                f"weights is {weights!r} beside vision_weights {vision_weights!r} and text_weights {text_weights!r}, "
                "which it takes the place of: set those to null."
            )
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}: give a number of pairs, or leave it out.")
        if not temperature_min <= temperature <= temperature_max:
            raise ValueError(f"temperature {temperature} is outside [{temperature_min}, {temperature_max}].")
        special = {"pad": pad_token_id, "cls": cls_token_id, "sep": sep_token_id, "mask": mask_token_id}
        if max(special.values()) >= vocab_size:
            raise ValueError(
                f"Token ids {special} do not all lie below vocab_size {vocab_size}: set both from the tokenizer."
            )
        text = bert_config(
            vocab_size,
            text_width,
            text_layers + fusion_layers,
            text_heads,
            text_ffn_width,
            max_positions,
            dropout,
            pad_token_id,
        )
        sizes = (image_size, patch_size, vision_width, vision_depth, vision_heads, vision_mlp_ratio)
        self.student = ALBEFNetwork(*sizes, text, text_layers, embed_dim, mlm, activation_checkpointing)
        self.teacher = ALBEFNetwork(*sizes, text, text_layers, embed_dim, mlm).requires_grad_(False)
        self.itm_head = nn.Linear(text_width, 2)
        # One entry instead of none: FSDP2 cannot shard a 0-D parameter.
        self.temperature = nn.Parameter(torch.tensor([temperature]))
        random_start = queue_start == "random"
        self.image_queue = FeatureQueue(queue_size, embed_dim, ids=True, random_start=random_start)
        self.text_queue = FeatureQueue(queue_size, embed_dim, ids=True, random_start=random_start)
        self.evaluation = RetrievalEvaluation(
            match_equal_texts, RerankSettings(rerank_k, rerank_on, rerank_score, rerank_memory_gib)
        )
        self._start_teacher()
        self.start_vocabulary()
        self.train()  # sets the teacher's mode too: Lightning trains in the modes that it finds

    def _start_teacher(self) -> None:
        self.teacher.load_state_dict(self.student.state_dict())

    def data_sizes(self) -> DataSizes:
        """What the encoders were made for."""
        return DataSizes(*(self.hparams[name] for name in ("image_size", "vocab_size", "max_positions")))

    def text_towers(self) -> Iterable[TextTower]:
        """The student's and the teacher's."""
        return self.student.text_encoder, self.teacher.text_encoder

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` moves once per optimizer step."""
        return {"teacher": EMAPair(source="student", target="teacher", momentum=self.hparams["momentum"])}

    def queues(self) -> dict[str, FeatureQueue]:
        """Return what `QueueCallback` fills after each batch."""
        return {"image": self.image_queue, "text": self.text_queue}

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, and what writes predictions, unless the user's own is there."""
        return missing_callbacks(
            self.trainer.callbacks,  # type: ignore[attr-defined]
            EMACallback(),
            QueueCallback(),
            StepSeedCallback(),
            RetrievalPredictionWriter(),
        )

    def configure_model(self) -> None:
        """Shard student and teacher where the strategy shards."""
        shard(self, [self.student, self.teacher])

    def on_fit_start(self) -> None:
        """Load initial weights, and compare token ids with the data's.

        Both wait until a checkpoint is restored: it replaces the weights, and may bring the data's tokenizer.

        Raises:
            ValueError: if the datamodule names other ids than this module was given.
        """
        super().on_fit_start()
        tokens = getattr(getattr(self.trainer, "datamodule", None), "special_token_ids", None)
        own = {name: self.hparams[f"{name}_token_id"] for name in tokens or ()}
        if tokens is not None and own != dict(tokens):
            raise ValueError(f"The tokenizer's special ids are {dict(tokens)}, the model's {own}: set the model's.")

    def on_train_start(self) -> None:
        """Fail before the first step where the end of the schedule is not known."""
        super().on_train_start()
        steps_of_run(self.trainer)

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """What `weights` expect, where they say it."""
        source = self.hparams["weights"]
        return None if source is None else preprocessing_of_source(source)

    def evaluates_initial_weights(self) -> bool:
        """Whether there is a trained ALBEF to start from."""
        return self.hparams["weights"] is not None

    def load_initial_weights(self) -> None:
        """Start from `weights`, else the student from `vision_weights` and `text_weights` and the teacher as its copy.

        What was done is logged.
        """
        if self.hparams["weights"] is not None:
            rank_zero_info(f"ALBEF starts with {load_trained(self, self.hparams['weights'])}.")
            return
        done = ["image encoder at random", "text and fusion encoder at random"]
        if self.hparams["vision_weights"] is not None:
            done[0] = load_vision_weights(self.student.visual_encoder, self.hparams["vision_weights"])
        if self.hparams["text_weights"] is not None:
            done[1] = load_text_weights(self.student.text_encoder, self.hparams["text_weights"])
        self._start_teacher()
        rank_zero_info(f"ALBEF starts with {done[0]}; {done[1]}; projections and matching head at random.")

    def save_pretrained(self, folder: str | Path, tokenizer_json: str | None = None) -> None:
        """Write the model, without the queues, to a new folder that `from_pretrained` and `weights` take.

        Under several processes call it in one of them.

        Args:
            folder: gets `model.safetensors` and `config.json`; must not exist or be empty.
            tokenizer_json: the tokenizer to put beside them, as `datamodule.tokenizer.backend_tokenizer.to_str()`
                returns it.

        Raises:
            FileExistsError: if there is something of that name already.
        """
        save_folder(self, folder, tokenizer_json)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Rebuild a module from `save_pretrained`'s folder, in eval mode; call `train()` to train it on.

        Raises:
            ValueError: if the folder is no export of this class, or is damaged.
        """
        return load_folder(cls, folder)

    def train(self, mode: bool = True) -> "ALBEFModule":
        """Set the mode; the teacher follows only if its dropout is wanted."""
        super().train(mode)
        self.teacher.train(mode and self.hparams["teacher_dropout"])
        return self

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Sum of the losses (eq. 5), and the teacher's features for the queues."""
        alpha = self.current_alpha()
        masked = self._draw_masked_tokens(batch["input_ids"]) if self.hparams["mlm"] else None
        student = self._encode(self.student, batch, masked)
        with torch.no_grad():
            teacher = self._encode(self.teacher, batch, masked)

        keys = self._keys(batch, teacher)
        loss_itc, image_logits, text_logits = self._contrast(batch, student, teacher, keys, alpha)
        negatives = self._draw_negatives(batch, image_logits, text_logits)
        matching, *masked_states = self._fuse(batch, student, *negatives)
        losses = {"itc": loss_itc, "itm": self._match(matching, *negatives)}
        if masked is not None:
            (fused,) = masked_states
            losses["mlm"] = self._predict_words(batch, teacher, masked, fused, alpha)

        loss = torch.stack(list(losses.values())).sum()
        self._log_step(loss, losses, alpha)
        return {
            "loss": loss,
            "keys": {"image": keys.image, "text": keys.text},
            "key_ids": {"image": keys.id, "text": keys.id},
            "keys_are_gathered": self.hparams["key_columns"] == "global",
        }

    def _encode(self, network: ALBEFNetwork, batch: Batch, masked: draws.MaskedTokens | None) -> _Encoded:
        def encode(image: Tensor, mask: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
            # Captions and masked captions share the text layers, so they go through them as one batch.
            states = network.encode_text(torch.cat(texts), mask.repeat(len(texts), 1))
            return network.encode_image(image), *states.chunk(len(texts))

        texts = [batch["input_ids"]] if masked is None else [batch["input_ids"], masked.input_ids]
        image_tokens, text_states, *masked_states = in_slices(
            encode, self.hparams["micro_batch_size"], batch["image"], batch["attention_mask"], *texts
        )
        return _Encoded(
            image_tokens,
            text_states,
            tuple(masked_states),
            network.project_image(image_tokens),
            network.project_text(text_states),
        )

    def _keys(self, batch: Batch, teacher: _Encoded) -> _Keys:
        """The teacher's features, of all processes if these are contrasted with; one exchange for both modalities."""
        if self.hparams["key_columns"] != "global":
            return _Keys(teacher.image_features, teacher.text_features, batch["image_id"])
        image, text = gather(torch.cat([teacher.image_features, teacher.text_features], 1)).chunk(2, 1)
        return _Keys(image, text, gather(batch["image_id"]))

    def _contrast(
        self, batch: Batch, student: _Encoded, teacher: _Encoded, keys: _Keys, alpha: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ITC loss (eqs. 1, 2 and 6), and the student's logits [B, B] over this process's own keys."""
        image_keys, text_keys, key_id = keys
        pairs = len(batch["image_id"])
        first = rank() * pairs if self.hparams["key_columns"] == "global" else 0  # the column of the first row's key

        def there(queue: FeatureQueue) -> Tensor:
            return torch.cat([torch.ones_like(key_id, dtype=torch.bool), queue.valid])

        def logits(queries: Tensor, keys: Tensor, queue: FeatureQueue) -> Tensor:
            similarity = torch.cat([queries @ keys.T, queries @ queue.features.T], 1) / self.temperature
            # The lowest finite number and not -inf: its product with a zero target is 0, not NaN.
            return similarity.masked_fill(~there(queue), torch.finfo(similarity.dtype).min)

        def targets(queries: Tensor, keys: Tensor, queue: FeatureQueue, image_id: Tensor, column: Tensor) -> Tensor:
            assert queue.ids is not None  # both queues were made with ids
            # Whatever an empty slot says is its image, it is none of the data's.
            positives = self._positives(image_id, column, torch.cat([key_id, queue.ids])) & there(queue)
            return contrastive_targets(logits(queries, keys, queue), positives, alpha)

        def contrast(*rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            image_id, column, teacher_image, teacher_text, student_image, student_text = rows
            with torch.no_grad():
                image_targets = targets(teacher_image, text_keys, self.text_queue, image_id, column)
                text_targets = targets(teacher_text, image_keys, self.image_queue, image_id, column)
            image_logits = logits(student_image, text_keys, self.text_queue)
            text_logits = logits(student_text, image_keys, self.image_queue)
            loss = itc_loss(image_logits, text_logits, image_targets, text_targets) * len(image_id)
            # Copies: a view of its columns would keep the whole of every slice's logits.
            own_logits = [part.detach()[:, first : first + pairs].clone() for part in (image_logits, text_logits)]
            return loss[None], own_logits[0], own_logits[1]

        with torch.autocast(self.device.type, enabled=False):
            loss, image_logits, text_logits = in_slices(
                contrast,
                self.hparams["micro_batch_size"],
                batch["image_id"],
                torch.arange(first, first + pairs, device=self.device),
                teacher.image_features,
                teacher.text_features,
                student.image_features,
                student.text_features,
            )
        return loss.sum() / pairs, image_logits, text_logits

    def _positives(self, image_id: Tensor, column: Tensor, key_id: Tensor) -> Tensor:
        """Boolean [B, M]: which keys match which row, whose own key is in `column` [B]."""
        if self.hparams["positives"] == "image_id":
            return image_id[:, None] == key_id
        return torch.arange(len(key_id), device=key_id.device) == column[:, None]

    def _draw_masked_tokens(self, input_ids: Tensor) -> draws.MaskedTokens:
        special = tuple(self.hparams[f"{name}_token_id"] for name in ("pad", "cls", "sep"))
        return draws.draw_masked_tokens(
            input_ids,
            special,
            self.hparams["mask_token_id"],
            self.hparams["vocab_size"],
            self.hparams["mask_probability"],
        )

    def _draw_negatives(
        self, batch: Batch, image_logits: Tensor, text_logits: Tensor
    ) -> tuple[draws.Negatives, draws.Negatives]:
        """Hard negatives within this process's batch: an image for every text, a text for every image."""
        image_id, input_ids = batch["image_id"], batch["input_ids"]
        forbidden = torch.eye(len(image_id), dtype=torch.bool, device=self.device)
        if self.hparams["positives"] == "image_id":
            same_text = (input_ids[:, None] == input_ids).all(-1)  # the same words are no wrong caption
            forbidden = forbidden | same_text | (image_id[:, None] == image_id)
        return (
            draws.draw_hard_negatives(text_logits, forbidden),
            draws.draw_hard_negatives(image_logits, forbidden),
        )

    def _fuse(
        self, batch: Batch, student: _Encoded, negative_image: draws.Negatives, negative_text: draws.Negatives
    ) -> tuple[Tensor, ...]:
        """Fuse pairs, (text, wrong image), (wrong text, image) and masked texts.

        Returns:
            States of CLS [B, 3, D] of the first three, and the masked texts' [B, L, D] if there are any.
        """
        wrong_image, wrong_text = negative_image.row, negative_text.row
        mask, text, tokens = batch["attention_mask"], student.text_states, student.image_tokens
        network, size = self.student, self.hparams["micro_batch_size"]
        masked = student.masked_states

        def states_of(*fused: Tensor) -> tuple[Tensor, ...]:
            pairs, with_wrong_text, *with_masked, with_wrong_image = fused
            return torch.stack([pairs[:, 0], with_wrong_image[:, 0], with_wrong_text[:, 0]], 1), *with_masked

        if size is None:
            # The batches whose row b looks at image b come first, as the fusion encoder wants them.
            states = torch.cat([text, text[wrong_text], *masked, text])
            masks = torch.cat([mask, mask[wrong_text], *[mask for _ in masked], mask])
            return states_of(*network.fuse(states, masks, tokens, wrong_image).chunk(3 + len(masked)))

        def fuse_slice(
            mask: Tensor, wrong_mask: Tensor, tokens: Tensor, wrong_tokens: Tensor, *texts: Tensor
        ) -> tuple[Tensor, ...]:
            masks = torch.cat([mask, wrong_mask, *[mask for _ in texts[2:]]])
            right = network.fuse(torch.cat(texts), masks, tokens).chunk(len(texts))
            return states_of(*right, network.fuse(texts[0], mask, wrong_tokens))

        return in_slices(
            fuse_slice, size, mask, mask[wrong_text], tokens, tokens[wrong_image], text, text[wrong_text], *masked
        )

    def _match(self, states: Tensor, negative_image: draws.Negatives, negative_text: draws.Negatives) -> Tensor:
        """ITM loss (eq. 4) of fused CLS states [B, 3, D]: the pair, then with a wrong image, then with a wrong text."""
        logits = at_least_float32(self.itm_head(states.transpose(0, 1).flatten(0, 1)))  # [3B, 2]
        labels = torch.arange(len(logits), device=self.device) < len(states)  # the first B are matches
        exists = torch.cat([torch.ones_like(negative_image.exists), negative_image.exists, negative_text.exists])
        weights = exists.float()
        return itm_loss(logits, labels.long(), weights, self._mean_count(weights.sum()))

    def _predict_words(
        self, batch: Batch, teacher: _Encoded, masked: draws.MaskedTokens, fused: Tensor, alpha: float
    ) -> Tensor:
        """MLM loss (eqs. 3 and 7) at the masked positions; the other positions carry none."""
        size = self.hparams["micro_batch_size"]

        def fuse(states: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor]:
            return (self.teacher.fuse(states, mask, tokens),)

        with torch.no_grad():
            (soft,) = in_slices(fuse, size, *teacher.masked_states, batch["attention_mask"], teacher.image_tokens)
        count = self._mean_count((masked.labels != -100).sum())

        def words(states: Tensor, teacher_states: Tensor, labels: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                teacher_logits = self.teacher.predict_words(teacher_states)
            return (mlm_loss(self.student.predict_words(states), teacher_logits, labels, alpha, count)[None],)

        # As many slices in every process, however many words it has masked: sharded networks run in step.
        sizes = size and [len(part) for part in masked.labels.tensor_split(math.ceil(len(fused) / size))]
        states, teacher_states = (tensor.flatten(0, 1)[masked.positions] for tensor in (fused, soft))
        return in_slices(words, sizes, states, teacher_states, masked.labels)[0].sum()

    def _mean_count(self, count: Tensor) -> Tensor:
        """Mean of a count over the processes, at least 1 over all of them: what a global mean divides sums by."""
        return all_reduce_sum(count.to(self.temperature.dtype)).clamp(min=1) / world_size()

    def current_alpha(self) -> float:
        """Weight of the soft targets: a ramp from 0 over the first `alpha_warmup_epochs` epochs, by batch.

        Raises:
            ValueError: if the loader has no length, so that nobody knows how long the ramp is.
        """
        ramp = self.hparams["alpha_warmup_epochs"] * self.trainer.num_training_batches
        if ramp == float("inf"):
            raise ValueError(
                "alpha rises over the first epoch, but the training loader has no length: give "
                "trainer.limit_train_batches as a number of batches, or set alpha_warmup_epochs to 0."
            )
        batch = self.trainer.fit_loop.epoch_loop.total_batch_idx
        return self.hparams["alpha"] * (min(1.0, batch / ramp) if ramp else 1.0)

    @torch.compiler.disable  # a name that is logged for the first time would compile the whole step again
    def _log_step(self, loss: Tensor, losses: dict[str, Tensor], alpha: float) -> None:
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/loss_{name}": value.detach() for name, value in losses.items()})
        self.log_dict({"train/temperature": self.temperature.detach().squeeze(), "train/alpha": alpha})

    def encode_images(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Unit-length features [B, E] of images [B, 3, S, S], and their tokens [B, N, V]."""
        tokens = self.student.encode_image(image)
        return self.student.project_image(tokens), tokens

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit-length features [B, E] of texts, ids and mask [B, L]."""
        return self.student.project_text(self.text_states(input_ids, attention_mask))

    def text_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """States [B, L, D] of texts before fusion, for `match_scores`."""
        return self.student.encode_text(input_ids, attention_mask)

    def match_scores(self, text_states: Tensor, attention_mask: Tensor, image_tokens: Tensor) -> Tensor:
        """Logits [R] of a match of R texts, [R, L, D] with mask [R, L], with one image [1, N, V] (section 3.4)."""
        fused = self.student.fuse(text_states, attention_mask, image_tokens)
        return at_least_float32(self.itm_head(fused[:, 0]))[:, 1]

    def word_maps(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Where tokens [B, L] look in their images [B, 3, S, S]: maps [B, L, g, g] over patches, in eval mode."""
        return gradcam.word_maps(self.student, self.itm_head, image, input_ids, attention_mask)

    def contrastive_temperature(self) -> float:
        """The learned temperature."""
        value = self.temperature
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    def reranks(self, stage: str) -> bool:
        """Whether candidates are re-ranked in a stage."""
        stages = {"never": (), "test": ("test", "predict"), "always": ("validate", "test", "predict")}
        return self.hparams["rerank_k"] > 0 and stage in stages[self.hparams["rerank_on"]]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, fused, with the schedule moved once per optimizer step."""
        decay = ("temperature",) if self.hparams["decay_temperature"] else ()
        groups = weight_decay_groups(self, self.hparams["weight_decay"], decay)
        optimizer = AdamW(groups, lr=self.hparams["learning_rate"], betas=self.hparams["betas"], fused=True)
        lay_out_moments(optimizer)
        # A factor of the peak, so that changing the peak on resume takes effect.
        schedule = LambdaLR(optimizer, lambda step: self.scheduled_lr(step) / self.hparams["learning_rate"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def scheduled_lr(self, step: int) -> float:
        """Learning rate at an optimizer step."""
        # The length of the run is not known yet when the optimizer is made, and asking for it then would build the
        # loaders before a checkpoint is restored. It is not needed for the first step.
        total = steps_of_run(self.trainer) if step else 0
        return learning_rate(step, total, self.trainer.max_epochs if step else 0, self.hparams)

    def bounds(self) -> Iterable[tuple[nn.Parameter, float, float]]:
        """Those of the temperature."""
        return [(self.temperature, self.hparams["temperature_min"], self.hparams["temperature_max"])]
