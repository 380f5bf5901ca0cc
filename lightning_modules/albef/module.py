"""ALBEF: align before fuse (Li et al., NeurIPS 2021, arXiv 2107.07651).

A ViT and the lower half of a BERT are aligned by a contrastive loss before the upper half fuses them by
cross-attention; a momentum copy of the whole model supplies soft targets and the keys of the queues, because captions
from the web do not quite say what a picture shows.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...callbacks import EMACallback, EMAPair, FeatureQueue, QueueCallback, StepSeedCallback, missing_callbacks
from ...callbacks.distributed import all_reduce_sum, gather, rank, world_size
from ..optimizer_groups import weight_decay_groups
from ..retrieval import RetrievalRecall
from ..schedules import warmup_cosine
from . import draws
from .losses import contrastive_targets, itc_loss, itm_loss, mlm_loss
from .network import ALBEFNetwork, at_least_float32, bert_config
from .schedule import official_lr
from .weights import load_text_weights, load_vision_weights

Batch = dict[str, Tensor]


class _Encoded(NamedTuple):
    """One model's view of a batch before fusion; the text batch holds the captions, then their masked copies."""

    image_tokens: Tensor  # [B, N, V]
    text_states: Tensor  # [B, L, D]
    masked_states: Tensor  # [B, L, D]
    image_features: Tensor  # [B, E]
    text_features: Tensor  # [B, E]


class ALBEFModule(LightningModule):
    """ALBEF pre-training: image-text contrast, image-text matching and masked language modelling.

    Sizes default to the paper's (ViT-B/16 at 256 px, BERT-base split 6 + 6). Where the authors' code and a better
    behaviour differ, the default is the better one; `configs/albef/official.yaml` sets all of theirs.

    Args:
        image_size: side of the square picture in pixels.
        patch_size: side of a patch in pixels.
        vision_width: width of the ViT.
        vision_depth: number of ViT blocks.
        vision_heads: attention heads of the ViT.
        vision_mlp_ratio: hidden width of the ViT's MLP over its width.
        vocab_size: words of the tokenizer. The command line sets it from the data's.
        max_positions: longest text in tokens that has a position embedding.
        text_width: width of BERT.
        text_heads: attention heads of BERT.
        text_ffn_width: hidden width of BERT's feed-forward part.
        text_layers: layers below the fusion.
        fusion_layers: layers with cross-attention to the image.
        dropout: of BERT, on hidden states and on attention; the ViT has none.
        embed_dim: width of the contrastive space.
        vision_weights: timm model name or file that the image encoder starts from (the paper:
            "deit_base_patch16_224.fb_in1k"). None means random.
        text_weights: hub name or folder of the BERT that text and fusion encoder start from (the paper:
            "bert-base-uncased"). None means random.
        queue_size: keys kept for each modality (section 3.5).
        queue_start: "empty" hides slots until they are filled; "random" starts with random unit vectors as negatives,
            as the authors do.
        momentum: of the teacher's moving average (section 3.5).
        teacher_dropout: whether BERT's dropout stays on in the teacher, as in the authors' code.
        alpha: weight of the teacher's soft targets (section 3.5).
        alpha_warmup_epochs: epochs over which alpha rises from 0, step by step.
        temperature: start of the learnable temperature.
        temperature_min: the temperature is clamped to at least this after each optimizer step.
        temperature_max: and to at most this.
        positives: "image_id" counts every key of the same picture as a match and never draws one as a hard negative;
            "diagonal" only the pair itself, as the authors' pre-training does.
        key_columns: "global" contrasts with the teacher's keys of all processes, so that N processes give the loss of
            one with N times the batch; "local" with this process's alone, as the authors do.
        mask_probability: share of the words that is masked.
        pad_token_id: of the tokenizer.
        cls_token_id: of the tokenizer.
        sep_token_id: of the tokenizer.
        mask_token_id: of the tokenizer.
        learning_rate: peak (section 3.5).
        min_learning_rate: at the end.
        warmup_learning_rate: at the first step.
        warmup_steps: optimizer steps of warm-up (the paper says 1000, the authors' configuration 2000).
        lr_schedule: "cosine" is linear warm-up and a cosine over all steps; "official" is the authors' staircase.
        weight_decay: of AdamW (section 3.5); norms, biases and the temperature are spared.
        decay_temperature: whether the temperature is decayed too, as in the authors' code.
        betas: of AdamW; torch's default, as with the authors.
        match_equal_texts: whether retrieval evaluation counts equal captions of other pictures as matches.

    Raises:
        ValueError: for sizes that do not fit together, or a temperature outside its bounds.
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
        match_equal_texts: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
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
        self.student = ALBEFNetwork(*sizes, text, text_layers, embed_dim)
        self.teacher = ALBEFNetwork(*sizes, text, text_layers, embed_dim).requires_grad_(False)
        self.itm_head = nn.Linear(text_width, 2)
        # One entry instead of none: FSDP2 cannot shard a 0-D parameter.
        self.temperature = nn.Parameter(torch.tensor([temperature]))
        random_start = queue_start == "random"
        self.image_queue = FeatureQueue(queue_size, embed_dim, ids=True, random_start=random_start)
        self.text_queue = FeatureQueue(queue_size, embed_dim, ids=True, random_start=random_start)
        self.recall = RetrievalRecall(match_equal_texts)
        self._started = False  # whether the weights are where training goes on from
        self._start_teacher()
        self.train()  # sets the teacher's mode too: Lightning trains in the modes that it finds

    def _start_teacher(self) -> None:
        self.teacher.load_state_dict(self.student.state_dict())

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` moves once per optimizer step."""
        return {"teacher": EMAPair(source="student", target="teacher", momentum=self.hparams["momentum"])}

    def queues(self) -> dict[str, FeatureQueue]:
        """Return what `QueueCallback` fills after each batch."""
        return {"image": self.image_queue, "text": self.text_queue}

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, unless the user's own is already there."""
        return missing_callbacks(
            self.trainer.callbacks,  # type: ignore[attr-defined]
            EMACallback(),
            QueueCallback(),
            StepSeedCallback(),
        )

    def setup(self, stage: str) -> None:
        """Load initial weights where what stands now is going to be sharded; such strategies restore later."""
        if stage == "fit" and self.trainer.strategy.restore_checkpoint_after_setup:
            self._start()

    def on_fit_start(self) -> None:
        """Load initial weights, and compare token ids with the data's.

        Both wait until a checkpoint is restored: it replaces the weights, and may bring the data's tokenizer.

        Raises:
            ValueError: if the datamodule names other ids than this module was given.
        """
        self._start()
        tokens = getattr(getattr(self.trainer, "datamodule", None), "special_token_ids", None)
        own = {name: self.hparams[f"{name}_token_id"] for name in tokens or ()}
        if tokens is not None and own != dict(tokens):
            raise ValueError(f"The tokenizer's special ids are {dict(tokens)}, the model's {own}: set the model's.")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; a training goes on from them, and leaves the initial ones alone."""
        self._started = True
        return super().load_state_dict(state_dict, strict, assign)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.load_initial_weights()

    def load_initial_weights(self) -> None:
        """Fill the student from `vision_weights` and `text_weights`, start the teacher as its copy, and log both."""
        done = ["image encoder at random", "text and fusion encoder at random"]
        if self.hparams["vision_weights"] is not None:
            done[0] = load_vision_weights(self.student.visual_encoder, self.hparams["vision_weights"])
        if self.hparams["text_weights"] is not None:
            done[1] = load_text_weights(self.student.text_encoder, self.hparams["text_weights"])
        self._start_teacher()
        rank_zero_info(f"ALBEF starts with {done[0]}; {done[1]}; projections and matching head at random.")

    def train(self, mode: bool = True) -> "ALBEFModule":
        """Set the mode; the teacher follows only if its dropout is wanted."""
        super().train(mode)
        self.teacher.train(mode and self.hparams["teacher_dropout"])
        return self

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return unit-length features of the pictures [B, E] and the texts [T, E] of a batch."""
        image_tokens = self.student.encode_image(batch["image"])
        text_states = self.student.encode_text(batch["input_ids"], batch["attention_mask"])
        return self.student.project_image(image_tokens), self.student.project_text(text_states)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Sum of the three losses (eq. 5), and the teacher's features for the queues."""
        alpha = self.current_alpha()
        masked = self._draw_masked_tokens(batch["input_ids"])
        student = self._encode(self.student, batch, masked)
        with torch.no_grad():
            teacher = self._encode(self.teacher, batch, masked)
            fused = self.teacher.text_encoder.fuse(teacher.masked_states, batch["attention_mask"], teacher.image_tokens)
            teacher_words = self._predict_words(self.teacher, fused, masked)

        loss_itc, image_logits, text_logits = self._contrast(batch, student, teacher, alpha)

        negatives = self._draw_negatives(batch, image_logits, text_logits)
        fused = self._fuse(batch, student, *negatives)  # [4, B, L, D]: positives, the two negatives, masked texts
        pairs = len(batch["image"])
        matching = at_least_float32(self.itm_head(fused[:3, :, 0].flatten(0, 1)))  # [3B, 2]
        labels = torch.arange(3 * pairs, device=self.device) < pairs  # the first B are matches
        weights = torch.cat([torch.ones_like(negatives[0].exists), *(drawn.exists for drawn in negatives)]).float()
        words = self._predict_words(self.student, fused[3], masked)
        itm_count, mlm_count = self._mean_counts(weights.sum(), (masked.labels != -100).sum())
        loss_itm = itm_loss(matching, labels.long(), weights, itm_count)
        loss_mlm = mlm_loss(words, teacher_words, masked.labels, alpha, mlm_count)

        loss = loss_itc + loss_itm + loss_mlm
        self._log_step(loss, loss_itc, loss_itm, loss_mlm, alpha)
        return {
            "loss": loss,
            "keys": {"image": teacher.image_features, "text": teacher.text_features},
            "key_ids": {"image": batch["image_id"], "text": batch["image_id"]},
        }

    def _encode(self, network: ALBEFNetwork, batch: Batch, masked: draws.MaskedTokens) -> _Encoded:
        # Captions and masked captions share the text layers, so they go through them as one batch.
        mask = batch["attention_mask"]
        states = network.encode_text(torch.cat([batch["input_ids"], masked.input_ids]), torch.cat([mask, mask]))
        text_states, masked_states = states.chunk(2)
        image_tokens = network.encode_image(batch["image"])
        return _Encoded(
            image_tokens,
            text_states,
            masked_states,
            network.project_image(image_tokens),
            network.project_text(text_states),
        )

    def _contrast(
        self, batch: Batch, student: _Encoded, teacher: _Encoded, alpha: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ITC loss (eqs. 1, 2 and 6), and the student's logits [B, B] over this process's own keys."""
        spread = gather if self.hparams["key_columns"] == "global" else _identity
        image_keys, text_keys, key_id = (
            spread(keys) for keys in (teacher.image_features, teacher.text_features, batch["image_id"])
        )
        pairs = len(batch["image_id"])
        own = rank() * pairs if self.hparams["key_columns"] == "global" else 0

        def logits(queries: Tensor, keys: Tensor, queue: FeatureQueue) -> Tensor:
            similarity = torch.cat([queries @ keys.T, queries @ queue.features.T], 1) / self.temperature
            empty = torch.cat([torch.zeros_like(key_id, dtype=torch.bool), ~queue.valid])
            # The lowest finite number and not -inf: its product with a zero target is 0, not NaN.
            return similarity.masked_fill(empty, torch.finfo(similarity.dtype).min)

        def targets(queries: Tensor, keys: Tensor, queue: FeatureQueue) -> Tensor:
            assert queue.ids is not None  # both queues were made with ids
            positives = self._positives(batch["image_id"], torch.cat([key_id, queue.ids]), own)
            return contrastive_targets(logits(queries, keys, queue), positives, alpha)

        with torch.autocast(self.device.type, enabled=False):
            with torch.no_grad():
                image_targets = targets(teacher.image_features, text_keys, self.text_queue)
                text_targets = targets(teacher.text_features, image_keys, self.image_queue)
            image_logits = logits(student.image_features, text_keys, self.text_queue)
            text_logits = logits(student.text_features, image_keys, self.image_queue)
            loss = itc_loss(image_logits, text_logits, image_targets, text_targets)
        return loss, image_logits[:, own : own + pairs], text_logits[:, own : own + pairs]

    def _positives(self, image_id: Tensor, key_id: Tensor, own: int) -> Tensor:
        """Boolean [B, M]: which keys match which row; `own` is the column of the first row's own key."""
        if self.hparams["positives"] == "image_id":
            return image_id[:, None] == key_id
        rows, columns = (torch.arange(len(ids), device=ids.device) for ids in (image_id, key_id))
        return columns == own + rows[:, None]

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
        """Hard negatives within this process's batch: a picture for every text, a text for every picture."""
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
    ) -> Tensor:
        """Fuse four text batches at once: [4, B, L, D] of pairs, (text, wrong image), (wrong text, image), masked."""
        mask = batch["attention_mask"]
        wrong = negative_text.row
        # The three batches whose row b looks at picture b come first, as the fusion encoder wants them.
        states = torch.cat(
            [student.text_states, student.text_states[wrong], student.masked_states, student.text_states]
        )
        masks = torch.cat([mask, mask[wrong], mask, mask])
        fused = self.student.text_encoder.fuse(states, masks, student.image_tokens, negative_image.row)
        pairs, wrong_text, masked, wrong_image = fused.chunk(4)
        return torch.stack([pairs, wrong_image, wrong_text, masked])

    def _predict_words(self, network: ALBEFNetwork, fused: Tensor, masked: draws.MaskedTokens) -> Tensor:
        """Vocabulary logits [K, V] of the masked positions; the other positions carry no loss."""
        return at_least_float32(network.text_encoder.cls(fused.flatten(0, 1)[masked.positions]))

    def _mean_counts(self, *counts: Tensor) -> Tensor:
        """Mean over the processes of each count, at least 1 over all of them: what a global mean divides sums by."""
        total = all_reduce_sum(torch.stack([count.to(self.temperature.dtype) for count in counts]))
        return total.clamp(min=1) / world_size()

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

    def _log_step(self, loss: Tensor, itc: Tensor, itm: Tensor, mlm: Tensor, alpha: float) -> None:
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({"train/loss_itc": itc.detach(), "train/loss_itm": itm.detach(), "train/loss_mlm": mlm.detach()})
        self.log_dict({"train/temperature": self.temperature.detach().squeeze(), "train/alpha": alpha})

    def on_validation_epoch_start(self) -> None:
        """Start a new evaluation."""
        self.recall.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Encode pictures and captions for retrieval."""
        image_features, text_features = self(batch)
        self.recall.update(image_features, text_features, batch["image_id"], batch["text_image_id"], batch["text_id"])

    def on_validation_epoch_end(self) -> None:
        """Log retrieval recall in percent."""
        self._log_recall("val")

    def on_test_epoch_start(self) -> None:
        """Start a new evaluation."""
        self.recall.reset()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Encode pictures and captions for retrieval."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log retrieval recall in percent."""
        self._log_recall("test")

    def _log_recall(self, prefix: str) -> None:
        recalls = self.recall.compute()
        # Every process has computed the same numbers; the mean over them only keeps Lightning from warning.
        self.log(f"{prefix}/recall_mean", recalls.pop("recall_mean"), prog_bar=True, sync_dist=True)
        self.log_dict({f"{prefix}/{name}": value for name, value in recalls.items()}, sync_dist=True)
        self.recall.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the features of pictures and texts with the ids that tell which is whose."""
        image_features, text_features = self(batch)
        result = {name: batch[name] for name in ("image_id", "text_image_id") if name in batch}
        return result | {"image_features": image_features, "text_features": text_features}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, fused, with the schedule moved once per optimizer step."""
        decay = ("temperature",) if self.hparams["decay_temperature"] else ()
        groups = weight_decay_groups(self, self.hparams["weight_decay"], decay)
        optimizer = AdamW(groups, lr=self.hparams["learning_rate"], betas=self.hparams["betas"], fused=True)
        # A factor of the peak, so that changing the peak on resume takes effect.
        schedule = LambdaLR(optimizer, lambda step: self.scheduled_lr(step) / self.hparams["learning_rate"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def scheduled_lr(self, step: int) -> float:
        """Learning rate at an optimizer step."""
        hp = self.hparams
        peak, floor, start, warmup = (
            hp[name] for name in ("learning_rate", "min_learning_rate", "warmup_learning_rate", "warmup_steps")
        )
        # The length of the run is not known yet when the optimizer is made, and asking for it then would build the
        # loaders before a checkpoint is restored. It is not needed for the first step.
        if step == 0:
            return start if warmup else peak
        total = int(self.trainer.estimated_stepping_batches)
        if hp["lr_schedule"] == "cosine":
            return warmup_cosine(step, total, peak, floor, warmup, start)
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise ValueError("The official learning-rate schedule counts epochs: set trainer.max_epochs.")
        return official_lr(step, max(total // epochs, 1), epochs, peak, floor, warmup, start)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Any = None,
    ) -> None:
        """Step, then clamp the temperature."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            self.temperature.clamp_(self.hparams["temperature_min"], self.hparams["temperature_max"])


def _identity(tensor: Tensor) -> Tensor:
    return tensor
