"""MobileCLIP: reinforced training (Vasu et al., CVPR 2024, arXiv 2311.17049; MobileCLIP2: TMLR 2025, arXiv 2508.20691).

A small image-text model learns from a data set that was reinforced once: each pair was stored with augmentations,
synthetic captions, and the embeddings of an ensemble of large models, so that a training step costs as much as plain
contrastive training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import (
    EMACallback,
    EMAPair,
    RetrievalPredictionWriter,
    StepSeedCallback,
    missing_callbacks,
    rank,
)
from ...common.errors import UserError
from ...common.ranges import COUNT, Range
from ..base.two_towers import TwoTowers
from ..core.memory import MemorySettings
from ..core.settings import plain
from ..core.trainers import callbacks_of
from ..evaluation.retrieval import RetrievalEvaluation
from ..losses.contrast import ContrastLosses, contrast_losses, pair_ids, student_features
from ..networks.clip.models import build_model
from ..networks.clip.pair import TowerPair
from ..networks.clip.preprocessing import preprocessing_of_weights, preprocessing_with, training_normalization
from ..networks.clip.shapes import ModelShape, OpenClipConfig, resolved
from ..networks.clip.weights import load_weights
from ..networks.published_clip import Tokenizer
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupCosine
from .range_augment import RangeAugment, student_images
from .settings import MomentumSettings, OptimSettings, TeacherSettings, VisionSettings
from .teachers import OnlineTeachers, StoredTeachers

CAPTIONS = {"real": "input_ids", "synthetic": "synthetic_input_ids"}
"""Token ids in a batch, by kind of caption."""


class MobileCLIPModule(TwoTowers):
    """Contrastive training of pairs and distillation of the teachers' similarities, with two captions per image.

    Each batch of reinforced data makes two batches of pairs, the augmented images with their real and with a synthetic
    caption, whose losses are added up (section 3). With a `teacher.distillation_weight` of 0 it is plain CLIP training,
    also on pairs without reinforcements.

    The defaults are the paper's for the S models; `configs/mobileclip/` has the paper's and the released scripts'.

    Args:
        model: the student: the name of one of MobileCLIP's or MobileCLIP2's models ("MobileCLIP-S0") or of open_clip's,
            or the shape of its towers: the path of a YAML or JSON file with the fields of `ModelShape`, or these; or a
            model by open_clip's configuration; or two towers that were not trained together (see `TowerPair`).
        weights: trained weights of that model to start from, or to evaluate: a file of the vendor or of open_clip, or a
            checkpoint of this class. Datamodules of this package then use the preprocessing of these weights.
        captions: captions to train on: "both", as in the paper, or one kind, for ablations.
        max_tokens: number of tokens of a text (CLIP: 77).
        max_logit_scale: upper bound of the student's logit scale, applied after each optimizer step (CLIP: 100).
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        vision: see `VisionSettings`.
        teacher: see `TeacherSettings`.
        momentum: see `MomentumSettings`.
        optim: see `OptimSettings`.
        memory: see `MemorySettings`.
        optimizer: replaces the paper's optimizer.
        lr_scheduler: replaces the paper's schedule.

    Raises:
        UserError: If settings do not fit together, or the model is unknown.
    """

    vision: VisionSettings
    teacher: TeacherSettings
    momentum: MomentumSettings
    optim: OptimSettings
    memory: MemorySettings

    def __init__(
        self,
        model: str | ModelShape | OpenClipConfig | TowerPair = "MobileCLIP-S0",
        weights: str | None = None,
        captions: Literal["both", "real", "synthetic"] = "both",
        max_tokens: Annotated[int, COUNT] = 77,
        max_logit_scale: Annotated[float, Range(least=1)] = 100.0,
        match_equal_texts: bool | None = None,
        vision: VisionSettings = VisionSettings(),
        teacher: TeacherSettings = TeacherSettings(),
        momentum: MomentumSettings = MomentumSettings(),
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.model = resolved(model)
        self.hparams.update(plain({"model": self.model}))  # not a path: a checkpoint needs no other file
        self.weights = weights
        self.captions = captions
        self.max_tokens = max_tokens
        self.max_logit_scale = max_logit_scale
        models = self.teacher.online()
        self.teachers: StoredTeachers | OnlineTeachers = (
            OnlineTeachers(models, self.memory.micro_batch_size) if models else StoredTeachers(self.teacher)
        )
        self.student = build_model(self.model, self.vision.image_size, max_tokens)
        self.student.logit_bias = None  # SigLIP's; this loss has none
        self.average = None
        if self.momentum.momentum is not None:
            self.average = copy.deepcopy(self.student).requires_grad_(False)
        self.augment = RangeAugment(self.vision.range_augment)
        self.evaluation = RetrievalEvaluation(match_equal_texts)
        self.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return L_Total(B_real) + L_Total(B_syn), each of (1 - lambda) L_CLIP + lambda L_Distill (section 3)."""
        weight = self.teacher.distillation_weight  # lambda
        captions = captions_of(batch, self.captions)  # the pairs: B_real and B_syn share their images
        for token_ids in captions.values():
            self.check_texts(token_ids)
        # The teachers see the images without RangeAugment, and run before the student's activations are held.
        targets = self.teachers.targets(batch, captions) if weight > 0 else {}
        image, losses = student_images(self.augment, self, batch["image"])
        student = student_features(self.student, image, captions, self.memory.micro_batch_size)
        # The teachers' targets include pairs of the same image.
        ids = None if weight > 0 else pair_ids(batch, True, self.teacher.mask_same_text)
        offset = rank() * len(image)
        for kind in captions:
            of_pairs = contrast_losses(student[kind], targets.get(kind, []), offset, self.memory.loss_rows, ids)
            losses.append(reinforced_loss(of_pairs, weight))  # L_Total
            self.log(f"train/contrast_{kind}", of_pairs.contrast.detach())
            if weight > 0:
                self.log(f"train/distillation_{kind}", of_pairs.distillation.detach())
        loss = torch.stack(losses).sum()
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/logit_scale", self.student.logit_scale.detach().exp().squeeze())
        return loss

    def setup(self, stage: str) -> None:
        """Adopt the data's normalization, and load the teachers or take them from the data."""
        super().setup(stage)
        if stage == "fit":
            images = training_normalization(self.datamodule, self.model, self.vision)
            self.augment.start(images)
            if self.teacher.distillation_weight > 0:
                clip_tokens = self.max_tokens if self.text_encoder is None else None
                self.teachers.load(clip_tokens, images, self.datamodule)

    @property
    def teacher_tokenizers(self) -> Mapping[str, Tokenizer]:
        """Tokenizers of online teachers that take other token ids than the student, by their name in a batch."""
        return self.teachers.tokenizers

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return the student and its average, which `EMACallback` updates after each optimizer step.

        The statistics of BatchNorm are averaged too.
        """
        if self.average is None or self.momentum.momentum is None:
            return {}
        pair = EMAPair("student", "average", self.momentum.momentum, buffers="average", warmup=self.momentum.warmup)
        return {"average": pair}

    def train(self, mode: bool = True) -> MobileCLIPModule:
        """Set the mode of the student; the average stays in eval mode."""
        super().train(mode)
        if self.average is not None:
            self.average.eval()
        return self

    @property
    def evaluated(self) -> Any:
        """The network that is evaluated and exported: the moving average if there is one, else the student."""
        return self.student if self.average is None else self.average

    def load_initial_weights(self) -> None:
        """Load `weights` into the student and its average."""
        if self.weights is None:
            self.load_tower_weights()
        else:
            rank_zero_info(load_weights(self.student, self.model, self.weights))
        if self.average is not None:
            self.average.load_state_dict(self.student.state_dict())

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return the preprocessing that `weights` expect, or the image tower of a pair."""
        if self.weights is not None:
            return preprocessing_of_weights(self.model, self.weights, self.vision.image_size)
        pair = isinstance(self.model, TowerPair)
        return preprocessing_with(self.model, self.vision).as_dict() if pair else None

    def sharded_networks(self) -> list[nn.Module]:
        """Return the student, its average and the teachers that run online."""
        return [network for network in (self.student, self.average, *self.teachers.networks) if network is not None]

    def configure_callbacks(self) -> list[Callback]:
        """Add the seed of each step, the writer of predictions and the moving average, if they are missing."""
        needed: list[Callback] = [StepSeedCallback(), RetrievalPredictionWriter()]
        if self.average is not None:
            needed.append(EMACallback())
        return missing_callbacks(callbacks_of(self), *needed)

    def bounds(self) -> list[tuple[nn.Parameter, float, float]]:
        """Return the logarithm of the logit scale, from 0 to that of `max_logit_scale`."""
        return [(self.student.logit_scale, 0.0, math.log(self.max_logit_scale))]

    def no_weight_decay(self) -> list[str]:
        """Return the layer scales, unless they decay."""
        if self.optim.decay_layer_scales:
            return []
        return [name for name, _ in self.student.named_parameters(prefix="student") if name.endswith(".gamma")]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas, self.optim.eps)

    def paper_schedule(self) -> Schedule:
        """Return a linear warm-up, a constant phase and half a cosine."""
        optim = self.optim
        return WarmupCosine(optim.learning_rate, optim.warmup_steps, optim.min_learning_rate, optim.constant_steps)

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs with the captions and the teachers' embeddings of a training, for `vlightning plan`."""
        batch = super().example_batch(rows, data)
        if self.captions != "real":
            batch["synthetic_input_ids"] = batch["input_ids"].clone()
        if self.teacher.distillation_weight > 0 and not self.teacher.models:
            width = sum(self.teachers.dims)
            names = ("teacher_image", "teacher_text", "teacher_synthetic")
            batch |= {name: torch.zeros(rows, width) for name in names}
        for name, tokenizer in self.teacher_tokenizers.items():
            batch[name] = torch.zeros(rows, tokenizer(["a"]).shape[1], dtype=torch.long)
        return batch

    def export(self, target: str | Path, layout: str = "torch_export") -> None:
        """Write the trained model in a layout, by default as programs; see `ExportedModule.export`."""
        super().export(target, layout)


def captions_of(batch: Mapping[str, Tensor], selection: str) -> dict[str, Tensor]:
    """Return the captions of a training batch to train on, token ids [b, L] by kind.

    Args:
        batch: the batch.
        selection: "real", "synthetic" or "both".

    Raises:
        UserError: If the batch has none.
    """
    captions = {kind: batch[name] for kind, name in CAPTIONS.items() if name in batch and selection in (kind, "both")}
    if not captions:
        raise UserError(
            f"Expected {CAPTIONS['synthetic']} in the training batch, got only {', '.join(batch)}: train on reinforced "
            "data, or leave model.captions out."
        )
    return captions


def reinforced_loss(losses: ContrastLosses, distillation_weight: float) -> Tensor:
    """Return L_Total(B) = (1 - lambda) L_CLIP(B) + lambda L_Distill(B) of one batch of pairs.

    A loss of weight 0 is left out.

    Args:
        losses: L_CLIP as `contrast`, and L_Distill as `distillation`.
        distillation_weight: lambda.
    """
    if distillation_weight == 0:
        return losses.contrast
    if distillation_weight == 1:
        return losses.distillation
    return (1 - distillation_weight) * losses.contrast + distillation_weight * losses.distillation
