"""NLVR2: whether a statement about two images is true (section 5 of the paper)."""

from collections.abc import Mapping

from torch import Tensor

from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..settings import MemorySettings, TaskMomentumSettings, TaskOptimSettings, TaskVisionSettings, TextSettings
from .task import ClassificationTask
from .weights import double_fusion


class NLVR2Module(ClassificationTask):
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

    inputs = ("input_ids", "attention_mask", "image_left", "image_right")
    unused_weights = (*ClassificationTask.unused_weights, "ta_head.")

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

        self.build_classifier(2)

    def convert_weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Start both halves of each doubled fusion layer from the same layer of a trained ALBEF."""
        return double_fusion(state, self.text.depth, self.text.fusion_depth)
