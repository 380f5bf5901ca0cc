"""Fine-tuning of a published CLIP on one's own pairs: in full, with locked layers, or with low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from open_clip import CustomTextCLIP
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import (
    RetrievalPredictionWriter,
    StepSeedCallback,
    StuckLossWarning,
    missing_callbacks,
    rank,
)
from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.method import Bound
from ..base.two_towers import TwoTowers
from ..core.memory import MemorySettings
from ..core.settings import plain
from ..core.towers import locked_towers
from ..core.trainers import callbacks_of
from ..evaluation.protocol import Batch
from ..evaluation.retrieval import RetrievalEvaluation
from ..losses.contrast import PairFeatures, coarse, contrast_losses, pair_ids, share_of_repeats, student_features
from ..losses.sigmoid import sigmoid_loss
from ..networks.clip.lora import base_state, load_adapters
from ..networks.clip.models import build_model
from ..networks.clip.pair import TowerPair, load_towers
from ..networks.clip.preprocessing import ImageSettings, preprocessing_of_weights, preprocessing_with
from ..networks.clip.shapes import Model, ModelShape, OpenClipConfig
from ..networks.clip.weights import LongerTexts
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupCosine
from .export import LAYOUTS as EXPORT_LAYOUTS
from .export import export
from .interpolation import interpolated
from .settings import LossSettings, OptimSettings, TuningSettings
from .start import load_start, model_of, needed_tokenizer
from .tuning import fix_batch_norm, fix_locked_encoders, parameter_groups, prepare

SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0
"""Initial logit scale and bias of SigLIP (section 3.2), for weights that were trained without a bias."""


class CLIPModule(TwoTowers):
    """Fine-tuning of a pair of towers with CLIP's or SigLIP's loss over the pairs of all processes.

    Args:
        model: a model of MobileCLIP's or of open_clip's by name, the shape of its towers (see `MobileCLIPModule`), or
            two towers that were not trained together (see `TowerPair`); left out for a folder.
        weights: published weights to start from: a tag of open_clip's (which is downloaded), a file of open_clip's, of
            the vendor's or of this package, or a folder of open_clip's (`local-dir:`). Datamodules of this package then
            use their preprocessing.
        max_tokens: number of tokens of a text (CLIP: 77); the largest one for an encoder of transformers.
        longer_texts: how the positions of published weights become `max_tokens`, if these are more: "stretched" keeps
            the first 20 and interpolates the others (Long-CLIP: from 77 to 248), so that a causal tower's features of
            short texts do not change; "interpolated" interpolates all; None refuses the weights. Encoders of
            transformers with relative or rotary positions need neither.
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        vision: see `ImageSettings`.
        loss: see `LossSettings`.
        tuning: which weights train, and how fast; see `TuningSettings`.
        optim: see `OptimSettings`.
        memory: see `MemorySettings`.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: If settings do not fit together, or the model is unknown.
    """

    vision: ImageSettings
    loss: LossSettings
    tuning: TuningSettings
    optim: OptimSettings
    memory: MemorySettings

    def __init__(
        self,
        model: str | ModelShape | OpenClipConfig | TowerPair | None = None,
        weights: str | None = None,
        max_tokens: Annotated[int, COUNT] = 77,
        longer_texts: LongerTexts | None = None,
        match_equal_texts: bool | None = None,
        vision: ImageSettings = ImageSettings(),
        loss: LossSettings = LossSettings(),
        tuning: TuningSettings = TuningSettings(),
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.model: Model = model_of(model, weights)
        self.hparams.update(plain({"model": self.model}))  # not a folder: a checkpoint needs no other file
        self.given = model
        self.weights = weights
        self.max_tokens = max_tokens
        self.longer_texts: LongerTexts | None = longer_texts
        self.student = self._build()
        prepare(self.student, self.tuning, isinstance(self.model, TowerPair))
        self.evaluation = RetrievalEvaluation(match_equal_texts)
        self.train()

    def _build(self) -> CustomTextCLIP:
        network = build_model(self.model, self.vision.image_size, self.max_tokens)
        network.logit_bias = None
        if self.loss.name == "sigmoid":
            network.logit_scale.data.fill_(math.log(SIGLIP_SCALE))
            network.logit_bias = nn.Parameter(torch.full([1], SIGLIP_BIAS))
        return network

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the contrastive loss of a batch of pairs; with CLIP's also as a share of ln B, `loss_share`.

        With short texts in the batch, that of images and short texts is added to it (Long-CLIP).
        """
        self.check_texts(batch["input_ids"])
        # Features of a locked tower may come with the batch.
        captions = {"text": batch["text_features"] if "text_features" in batch else batch["input_ids"]}
        images = batch["image_features"] if "image_features" in batch else batch["image"]
        if "short_input_ids" in batch:
            captions["short"] = batch["short_input_ids"]
        features = student_features(self.student, images, captions, self.memory.micro_batch_size)
        pairs = len(features["text"].all_image)
        if pairs < 2:
            raise UserError("Expected a batch of at least 2 pairs, got 1 without a negative: raise data.batch_size.")
        loss = self._contrast(features["text"], self._ids(batch))
        outputs = {"loss": loss}
        if self.loss.name == "softmax":
            outputs["loss_share"] = loss.detach() / math.log(pairs)  # 1: no better than chance
            self.log("train/loss_share", outputs["loss_share"])
        if "short" in features:
            outputs["loss"] = loss + self.loss.short_weight * self._short_contrast(features["short"], batch)
        self.log("train/loss", outputs["loss"].detach(), prog_bar=True)
        self.log("train/logit_scale", self.student.logit_scale.detach().exp().squeeze())
        return outputs

    def _contrast(self, features: PairFeatures, ids: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the loss of pairs, 0-D."""
        offset = rank() * len(features.image)
        if self.loss.name == "sigmoid":
            return sigmoid_loss(features, self.student.logit_bias, offset, self.memory.loss_rows, ids)
        return contrast_losses(features, [], offset, self.memory.loss_rows, ids).contrast

    def _short_contrast(self, features: PairFeatures, batch: Batch) -> Tensor:
        """Return the loss of images and their short texts, 0-D."""
        names = {"input_ids": batch["short_input_ids"], "attention_mask": batch["short_attention_mask"]}
        ids = pair_ids({**batch, **names}, self.loss.mask_same_image, self.loss.mask_same_text)
        if self.loss.short_components is not None:
            features = coarse(features, self.loss.short_components)
        loss = self._contrast(features, ids)
        self.log("train/short_loss", loss.detach())
        return loss

    def _ids(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return the ids of pairs that are not negatives of each other; log how many images and texts repeat."""
        ids = pair_ids(batch, True, True)
        assert ids is not None  # texts always have an id
        names = ["image", "text"][-ids[0].shape[1] :]
        masked = []
        for name, row_ids, column_ids in zip(names, ids[0].T, ids[1].T, strict=True):
            self.log(f"train/repeated_{name}s", share_of_repeats(column_ids))
            if getattr(self.loss, f"mask_same_{name}"):
                masked.append((row_ids, column_ids))
        if not masked:
            return None
        rows, columns = (torch.stack(kept, 1) for kept in zip(*masked, strict=True))
        return rows, columns

    def train(self, mode: bool = True) -> CLIPModule:
        """Set the mode; a locked encoder, and statistics of BatchNorm that must not change, stay in eval mode."""
        super().train(mode)
        fix_batch_norm(self.student, self.tuning)
        if isinstance(self.model, TowerPair):
            fix_locked_encoders(self.student)
        return self

    # Overrides of Method

    def load_initial_weights(self) -> None:
        """Load `weights`, else those of both towers, below the adapters if there are any, and saved adapters."""
        lora = self.tuning.lora
        if lora is not None and lora.weights is not None:
            load_adapters(self.student, lora.weights)
        if self.weights is None and not isinstance(self.model, TowerPair):
            return
        network = self.student if self.tuning.lora is None else self._build()
        if self.weights is not None:
            load_start(network, self.model, self.given, self.weights, self.longer_texts)
        elif isinstance(self.model, TowerPair):
            rank_zero_info(load_towers(network, self.model))
        if network.logit_bias is not None and not network.logit_bias.any():  # the weights have none
            network.logit_scale.data.fill_(math.log(SIGLIP_SCALE))
            network.logit_bias.data.fill_(SIGLIP_BIAS)
        if self.tuning.lora is not None:
            state = self.student.state_dict()
            loaded = network.state_dict()
            with torch.no_grad():
                for name, name_with_adapters in base_state(state).items():
                    state[name_with_adapters].copy_(loaded[name])

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return the preprocessing that `weights` expect, or the image tower of a pair."""
        if self.weights is None:
            pair = isinstance(self.model, TowerPair)
            return preprocessing_with(self.model, self.vision).as_dict() if pair else None
        return preprocessing_of_weights(self.model, self.weights, self.vision.image_size)

    def setup(self, stage: str) -> None:
        """Compare the data's tokenizer with that of the model.

        Raises:
            UserError: If the model was trained with a tokenizer of the hub and the data has CLIP's.
        """
        super().setup(stage)
        needed = None if self.text_encoder is not None else needed_tokenizer(self.model)
        if needed is None:
            return
        if getattr(getattr(self.datamodule, "tokenizer", None), "vocab_size", None) == CLIP_VOCABULARY:
            raise UserError(
                f"Expected the tokenizer {needed} of {self.model}, got CLIP's: set data.tokenizer to {needed}, and "
                f"data.vocab_size and data.max_tokens to the model's."
            )

    @property
    def locked_towers(self) -> list[str]:
        """Towers whose features stay the same in training, among `image` and `text`: they may come from a store."""
        return locked_towers(self.student)

    def sharded_networks(self) -> list[nn.Module]:
        """Return the towers."""
        return [self.student]

    def configure_callbacks(self) -> list[Callback]:
        """Add seeds, the writer of predictions, and a warning for a loss that does not fall, if they are missing."""
        needed: list[Callback] = [StepSeedCallback(), RetrievalPredictionWriter()]
        if self.loss.name != "sigmoid":  # at chance it is not ln B, with which the warning compares
            needed.append(StuckLossWarning())
        return missing_callbacks(callbacks_of(self), *needed)

    def bounds(self) -> list[Bound]:
        """Return the logarithm of the logit scale, from 0 to that of `loss.max_logit_scale`."""
        return [(self.student.logit_scale, 0.0, math.log(self.loss.max_logit_scale))]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return groups with and without weight decay, and of each layer if the rates differ."""
        return parameter_groups(self, self.student, self.tuning.layer_decay)

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: the given one, or the default of what trains."""
        if self.optim.learning_rate is not None:
            return self.optim.learning_rate
        return 1e-5 if self.tuning.lora is None else 2e-4

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.learning_rate, self.optim.weight_decay, self.optim.betas, self.optim.eps)

    def paper_schedule(self) -> Schedule:
        """Return a linear warm-up and half a cosine to 0."""
        return WarmupCosine(self.learning_rate, warmup_start=0.0, warmup_share=self.optim.warmup_share)

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return EXPORT_LAYOUTS | super().layouts()

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the model of a checkpoint in a layout of the method's own."""
        return export(content, source, target, layout, dtype)

    @classmethod
    def interpolated(cls, content: Mapping[str, Any], source: str, ratio: float) -> dict[str, Any]:
        """Return the checkpoint of a model between the published weights and a fine-tuning (WiSE-FT)."""
        return interpolated(cls, content, source, ratio)
