"""Visual entailment (SNLI-VE): whether an image entails, contradicts or leaves open a text (section 5 of the paper)."""

from __future__ import annotations

from typing import Annotated

from ....common.ranges import COUNT
from ...evaluation.classification import check_classes
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..settings import EntailmentMomentumSettings, MemorySettings, TaskOptimSettings, TaskVisionSettings, TextSettings
from .task import ClassificationTask


class EntailmentModule(ClassificationTask):
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

    inputs = ("input_ids", "attention_mask", "image")

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

        self.build_classifier(num_classes)

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the number of classes with the data's."""
        super().on_fit_start()
        check_classes(self, self.num_classes)
