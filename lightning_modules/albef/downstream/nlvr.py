"""NLVR2: whether a statement about two images is true (section 5 of the paper)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ....callbacks import ClassPredictionWriter
from ...base.example_batch import pair_batch
from ...evaluation.classification import ClassificationEvaluation
from ...evaluation.protocol import Batch
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..settings import MemorySettings, TaskMomentumSettings, TaskOptimSettings, TaskVisionSettings, TextSettings
from . import weights as initial_weights
from .network import TaskNetwork, class_head
from .official import double_fusion
from .task import LONGEST_EXAMPLE, TaskMethod

INPUTS = ("input_ids", "attention_mask", "image_left", "image_right")
UNUSED = ("vision_proj.", "text_proj.", "text_encoder.cls.", "ta_head.")


class NLVR2Module(TaskMethod):
    """Classification of a statement about two images into false (0) and true (1).

    Each layer of the fusion encoder is doubled: one half attends to the left image, the other to the right. Defaults
    are the paper's.

    Args:
        vision: the image encoder.
        text: the text and fusion encoder.
        momentum: the momentum teacher and its soft targets.
        optim: AdamW and its learning rate.
        memory: activation memory.
        weights: initial weights of student and teacher: a checkpoint of the authors (text assignment, this task, or
            pre-training), of `TextAssignmentModule`, `ALBEFModule` or this class, or the folder of an export.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the paper's schedule.
    """

    writer = ClassPredictionWriter

    def __init__(
        self,
        vision: TaskVisionSettings = TaskVisionSettings(),
        text: TextSettings = TextSettings(),
        momentum: TaskMomentumSettings = TaskMomentumSettings(),
        optim: TaskOptimSettings = TaskOptimSettings(),
        memory: MemorySettings = MemorySettings(),
        weights: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.weights = weights

        def network(text: TextSettings, recompute: bool) -> TaskNetwork:
            return TaskNetwork(self.vision, text, class_head(text.width, 2), 2, recompute)

        self.build(network)
        self.evaluation = ClassificationEvaluation(INPUTS, {"accuracy": 1}, keeps_result=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy, with the teacher's classes as soft targets."""
        alpha = self.current_alpha()
        loss = self.distilled_loss(alpha, batch["label"], *(batch[name] for name in INPUTS))
        self.log_step(loss, alpha)
        return loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return logits [B, 2] of statements, ids and mask [B, L], about images [B, 3, S, S]."""
        logits: Tensor = self.student(input_ids, attention_mask, left, right)
        return logits

    def task_weights(self) -> initial_weights.TaskWeights:
        """Start both halves of each doubled fusion layer from the same layer of a trained ALBEF; the head is new."""
        double = partial(double_fusion, depth=self.text.depth, fusion_depth=self.text.fusion_depth)
        return initial_weights.TaskWeights(new=("cls_head.",), unused=UNUSED, convert=double)

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return statements about two images with the shapes of a training, for `vlightning plan`."""
        return pair_batch(self, rows, data, INPUTS[2:], longest=LONGEST_EXAMPLE)
