"""MM-LG: a multimodal learngene of CLIP (Chen et al., "Extracting Multimodal Learngene in CLIP", arXiv 2506.16673).

1. Extraction (sections 3.2 and 3.3) trains an auxiliary CLIP whose layers are weighted sums of a few stored blocks,
   with CLIP's loss and distillation from a teacher. The stored tensors, half as many numbers as that CLIP has, are the
   learngene, which `LearngeneWriter` writes to a file.
2. Initialization: `LearngeneExpansionCallback` makes CLIPs of 6 to 12 layers from the file, the descendants.
3. A descendant is activated on a tenth of the pairs, and fine-tuned; both are trainings of `MMLGModule` with
   `student="plain"`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import RetrievalPredictionWriter, StepSeedCallback, missing_callbacks
from ...callbacks.distributed.collectives import rank
from ...callbacks.learngene.file import Learngene
from ...callbacks.learngene.layers import LearngeneTerms
from ...common.log import log_global
from ...common.ranges import Range
from ..base.example_batch import pair_batch
from ..base.method import Bound, Method
from ..base.sharding import full_state
from ..core.checkpoints import preprocessing_of_checkpoint
from ..core.fitting import load_student
from ..core.frozen import Frozen
from ..core.precision import unit
from ..core.trainers import callbacks_of
from ..evaluation.protocol import Batch
from ..evaluation.retrieval import RetrievalEvaluation
from ..losses.contrast import ContrastLosses, check_length, contrast_losses, pair_ids
from ..networks.published_clip import Tokenizer
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupCosine
from .export import LAYOUTS, export
from .network import LearngeneCLIP
from .settings import (
    EvaluationSettings,
    MemorySettings,
    OptimSettings,
    TeacherSettings,
    TextSettings,
    TowerSettings,
    VisionSettings,
    learngene_sizes,
)
from .students import NETWORKS, Student
from .teacher import TEACHER_IDS, gathered_features, has_other_tokens, load_teacher, teacher_features, teacher_ids


class MMLGModule(Method):
    """Training of a CLIP with a teacher: extraction with an auxiliary as the student, or training of a descendant.

    With the default sizes the auxiliary stores 30,311,065 numbers, and the ordinary CLIP that it computes has
    62,257,537 parameters. The teacher is not in the checkpoint, which names it and holds a fingerprint of its weights.

    Args:
        student: "MM-LG" extracts; "TLEG" extracts as the method of that name, a baseline; "plain" is an ordinary CLIP:
            a descendant with a `LearngeneExpansionCallback`, else the paper's baselines "PT-FT" and "scratch", whose
            last layers are He-LG's learngene.
        towers: sizes of both towers.
        vision: images.
        text: token sequences.
        teacher: the CLIP whose logits are distilled.
        weights: checkpoint of an earlier training of this class, of the same sizes, whose student this one starts from.
        max_logit_scale: upper bound of the logit scale, which is clamped after each optimizer step (CLIP).
        optim: AdamW and its schedule.
        memory: recomputation.
        evaluation: retrieval evaluation.
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: If sizes do not fit together, or a number is out of its range.
    """

    towers: TowerSettings
    vision: VisionSettings
    text: TextSettings
    distillation: TeacherSettings
    optim: OptimSettings
    memory: MemorySettings
    evaluation_settings: EvaluationSettings

    def __init__(
        self,
        student: Student = "MM-LG",
        towers: TowerSettings = TowerSettings(),
        vision: VisionSettings = VisionSettings(),
        text: TextSettings = TextSettings(),
        teacher: TeacherSettings = TeacherSettings(),
        weights: str | None = None,
        max_logit_scale: Annotated[float, Range(least=1)] = 100.0,
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        evaluation: EvaluationSettings = EvaluationSettings(),
        match_equal_texts: bool | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals(), teacher="distillation", evaluation="evaluation_settings")
        self.weights = weights
        self.max_logit_scale = max_logit_scale

        self.student = NETWORKS[student](learngene_sizes(self.towers, self.vision, self.text))
        self.teacher: Frozen[Any] = Frozen()  # loaded when a fit starts
        self.teacher_scale = 0.0
        self.teacher_tokenizers: dict[str, Tokenizer] = {}  # of a teacher with other token ids than the student's
        self._teacher_preprocessing: dict[str, Any] | None = None
        self.evaluation = RetrievalEvaluation(match_equal_texts, protocols=self.evaluation_settings.protocols)

    # ---- Training ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return L = L_CLIP + lambda L_dist over the pairs of all ranks (eqs. 3 to 8)."""
        check_length(batch["input_ids"], self.text.max_tokens)
        slice_rows = self.memory.micro_batch_size
        teachers = []
        if self.distillation.distillation_weight:  # before the student, to free the teacher's activations
            input_ids = teacher_ids(batch) if self.teacher_tokenizers else batch["input_ids"]
            image, text = teacher_features(self.teacher.network, batch["image"], input_ids, slice_rows)
            teachers.append(gathered_features(image, text, self.teacher_scale))
        image, text = self.student.encode_pairs(batch["image"], batch["input_ids"], slice_rows)
        student = gathered_features(image, text, self.student.logit_scale.exp(), gradient=True)
        # The teacher's targets include pairs of the same image.
        ids = None if teachers else pair_ids(batch, True, self.distillation.mask_same_text)
        losses = contrast_losses(student, teachers, rank() * len(student.image), self.memory.loss_rows, ids)
        loss = extraction_loss(losses, self.distillation.distillation_weight)

        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/contrast", losses.contrast.detach())
        if teachers:
            self.log("train/distillation", distillation_loss(losses).detach())
        self.log("train/logit_scale", self.student.logit_scale.detach().exp().squeeze())
        return loss

    def bounds(self) -> Iterable[Bound]:
        """Keep the logit scale, a logarithm, between 1 and `max_logit_scale`."""
        return [(self.get_parameter("student.logit_scale"), 0.0, math.log(self.max_logit_scale))]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        optim = self.optim
        return adamw(groups, optim.learning_rate, optim.weight_decay, optim.betas, optim.eps)

    def paper_schedule(self) -> Schedule:
        """Return linear warm-up, then cosine decay to 0."""
        return WarmupCosine(self.optim.learning_rate, self.optim.warmup_steps)

    # ---- Learngene ---------------------------------------------------------------------------------------------------

    def learngene(self) -> Learngene:
        """Return the learngene extracted so far, whose tensors rank 0 gets; a collective call."""
        state = {name: tensor.detach().float() for name, tensor in full_state(self.student).items()}
        tensors = self.student.learngene_tensors(state) if state else state
        return Learngene(
            tensors, self.student.sizes, self.student.method, self.teacher.origin, preprocessing=self.preprocessing()
        )

    def learngene_terms(self) -> LearngeneTerms | None:
        """Return coefficients and norms of the sums' terms, None for other students; a collective call."""
        return self.student.terms() if isinstance(self.student, LearngeneCLIP) else None

    def on_train_epoch_end(self) -> None:
        """Log the means over the layers of coefficients and norms."""
        terms = self.learngene_terms()
        if terms is not None:
            means = {f"train/coefficient_{name}": fmean(values) for name, values in terms.coefficients.items()}
            means |= {f"train/summand_norm_{name}": fmean(values) for name, values in terms.norms.items()}
            log_global(self, means)

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Encode the images and the texts of a batch: unit-length features [B, E] of both."""
        return self.encode_images(batch["image"])[0], self.encode_texts(batch["input_ids"], batch["attention_mask"])

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Encode images [B, 3, S, S]: unit-length features [B, E]."""
        return unit(self.image_features(image)), None

    def image_features(self, image: Tensor) -> Tensor:
        """Encode images [B, 3, S, S]: unnormalized features [B, E]."""
        return self.student.encode_image(image)

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode texts [B, L]: unit-length features [B, E] of the end-of-text tokens."""
        return unit(self.text_features(input_ids, attention_mask))

    def text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode texts [B, L]: unnormalized features [B, E] of the end-of-text tokens."""
        check_length(input_ids, self.text.max_tokens)
        return self.student.encode_text(input_ids)

    # ---- Start of a run ----------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Add the callbacks that the method needs, unless the user gave them."""
        needed = (StepSeedCallback(), RetrievalPredictionWriter())
        return missing_callbacks(callbacks_of(self), *needed)

    def setup(self, stage: str) -> None:
        """Load the teacher, which only training needs."""
        super().setup(stage)
        if stage == "fit" and self.distillation.distillation_weight and not self.teacher.loaded:
            prepared = getattr(self.datamodule, "preprocessing", None) or {}
            loaded = load_teacher(self.distillation, self.vision, self.text, prepared)
            self.teacher.network = loaded.network
            self.teacher.record(loaded.model, loaded.weights)
            self.teacher_scale = float(loaded.network.logit_scale.exp())
            self._teacher_preprocessing = loaded.preprocessing.as_dict()
            if has_other_tokens(loaded.network):
                self.teacher_tokenizers = {TEACHER_IDS: loaded.tokenizer}

    def sharded_networks(self) -> Sequence[nn.Module]:
        """Return the student, and the teacher if there is one."""
        return [self.student, self.teacher.network] if self.teacher.loaded else [self.student]

    def load_initial_weights(self) -> None:
        """Start from `weights`, if given."""
        if self.weights is not None:
            rank_zero_info(load_student(self.student, self.weights, type(self).__name__))

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return how `weights`, else the teacher, expect images to be prepared."""
        return self._teacher_preprocessing if self.weights is None else preprocessing_of_checkpoint(self.weights)

    def network_methods(self) -> Sequence[str]:
        """Return the methods of student and teacher that use their parameters."""
        return "encode_image", "encode_text", "encode_pairs"

    def module_methods(self) -> Sequence[str]:
        """Return the methods that encode images and texts."""
        return "encode_images", "encode_texts"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs of images and texts with the shapes of a training, for `vlightning plan`."""
        batch = pair_batch(self, rows, data)
        for name, tokenizer in self.teacher_tokenizers.items():
            batch[name] = torch.zeros(rows, tokenizer(["a"]).shape[1], dtype=torch.long)
        return batch

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return LAYOUTS | super().layouts()

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the model of a checkpoint in a layout of the method's own."""
        return export(cls, content, source, target, layout, dtype)


def extraction_loss(losses: ContrastLosses, distillation_weight: float) -> Tensor:
    """Return L = L_CLIP + lambda L_dist (eq. 8).

    Args:
        losses: contrast (eq. 4) and distillation of the batch.
        distillation_weight: lambda.
    """
    if not distillation_weight:
        return losses.contrast
    return losses.contrast + distillation_weight * distillation_loss(losses)


def distillation_loss(losses: ContrastLosses) -> Tensor:
    """Return L_dist (eqs. 5 to 7), the cross entropy of the student's softmax with the teacher's in both directions.

    It is the mean of the directions. Its gradient is that of the Kullback-Leibler divergence; its minimum is the
    teacher's entropy, not 0.
    """
    return losses.distillation + losses.entropy
