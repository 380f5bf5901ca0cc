"""Visual entailment (SNLI-VE): whether an image entails, contradicts or leaves open a text (section 5 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor

from ....callbacks import ClassPredictionWriter
from ....common.ranges import COUNT
from ...base.example_batch import pair_batch
from ...evaluation.classification import ClassificationEvaluation, check_classes
from ...evaluation.protocol import Batch
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..settings import EntailmentMomentumSettings, MemorySettings, TaskOptimSettings, TaskVisionSettings, TextSettings
from . import weights as initial_weights
from .network import TaskNetwork, class_head
from .task import LONGEST_EXAMPLE, TaskMethod

INPUTS = ("input_ids", "attention_mask", "image")


class EntailmentModule(TaskMethod):
    """Classification of an image with a text into contradiction (0), neutral (1) and entailment (2).

    Defaults are the paper's.

    Args:
        vision: the image encoder.
        text: the text and fusion encoder.
        momentum: the momentum teacher and its soft targets.
        optim: AdamW and its learning rate.
        memory: activation memory.
        weights: initial weights of student and teacher: a checkpoint of the authors (pre-training or of this task), of
            `ALBEFModule` or of this class, or the folder of an export.
        num_classes: number of classes.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the paper's schedule.
    """

    writer = ClassPredictionWriter

    def __init__(
        self,
        vision: TaskVisionSettings = TaskVisionSettings(),
        text: TextSettings = TextSettings(),
        momentum: EntailmentMomentumSettings = EntailmentMomentumSettings(),
        optim: TaskOptimSettings = TaskOptimSettings(),
        memory: MemorySettings = MemorySettings(),
        weights: str | None = None,
        num_classes: Annotated[int, COUNT] = 3,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.weights = weights
        self.num_classes = num_classes

        def network(text: TextSettings, recompute: bool) -> TaskNetwork:
            return TaskNetwork(self.vision, text, class_head(text.width, num_classes), 1, recompute)

        self.build(network)
        self.evaluation = ClassificationEvaluation(INPUTS, {"accuracy": 1}, keeps_result=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy, with the teacher's classes as soft targets."""
        alpha = self.current_alpha()
        loss = self.distilled_loss(alpha, batch["label"], *(batch[name] for name in INPUTS))
        self.log_step(loss, alpha)
        return loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, image: Tensor) -> Tensor:
        """Return logits [B, C] of texts, ids and mask [B, L], with images [B, 3, S, S]."""
        logits: Tensor = self.student(input_ids, attention_mask, image)
        return logits

    def task_weights(self) -> initial_weights.TaskWeights:
        """Start from a trained ALBEF without projections and language-model head; the classification head is new."""
        return initial_weights.TaskWeights(new=("cls_head.",))

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the number of classes with the data's."""
        super().on_fit_start()
        check_classes(self, self.num_classes)

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs of images and texts with the shapes of a training, for `vlightning plan`."""
        return pair_batch(self, rows, data, longest=LONGEST_EXAMPLE)
