"""The common part of the tasks' methods: a student, its momentum teacher, and a start from a trained ALBEF."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from ....callbacks import EMACallback, EMAPair, StepSeedCallback, missing_callbacks
from ...base.method import Method
from ...base.vocabulary import TextTower
from ...core.checkpoints import preprocessing_of_checkpoint
from ...core.trainers import trainer_of
from ...optim.adamw import adamw
from ...optim.schedules import Schedule
from ..schedule import paper_schedule
from ..settings import MemorySettings, TextSettings, VisionSettings
from ..teacher import copy_student, ramped_alpha, teacher_text
from . import weights as initial_weights
from .settings import TaskMomentumSettings, TaskOptimSettings


class TaskMethod(Method):
    """Base of the methods that fine-tune a trained ALBEF.

    A task's constructor sets the groups of settings below and `weights`, and calls `build`; a task defines
    `task_weights` and `training_step`.
    """

    vision: VisionSettings
    text: TextSettings
    momentum: TaskMomentumSettings | None
    optim: TaskOptimSettings
    memory: MemorySettings
    weights: str | None
    student: Any
    teacher: Any
    writer: ClassVar[type[Callback] | None] = None
    """Callback that writes what `predict` returns."""

    def build(self, network: Callable[[TextSettings, bool], nn.Module]) -> None:
        """Build the student and, with distillation, its teacher; then adopt the vocabulary of `weights`.

        Args:
            network: from the settings of the text encoder, and whether blocks recompute their activations.

        Raises:
            UserError: If weights of a part are named, which a task would not load.
        """
        initial_weights.check_sources(self.vision, self.text)
        self.student = network(self.text, self.memory.activation_checkpointing)
        self.teacher = None
        if self.momentum is not None and self.momentum.distill:
            self.teacher = network(teacher_text(self.text, self.momentum), False)
            copy_student(self.student, self.teacher)
        self.start_vocabulary()

    @abstractmethod
    def task_weights(self) -> initial_weights.TaskWeights:
        """Return how the networks start from those of a trained ALBEF."""

    def current_alpha(self) -> float:
        """Return the weight of the teacher's soft targets in this batch; 0 without a teacher."""
        if self.momentum is None or self.teacher is None:
            return 0.0
        return ramped_alpha(self.trainer, self.momentum)

    @torch.compiler.disable  # logging a name for the first time would compile the whole step again
    def log_step(self, loss: Tensor, alpha: float | None = None) -> None:
        """Log the loss of a step, and the weight of the soft targets."""
        self.log("train/loss", loss.detach(), prog_bar=True)
        if alpha is not None:
            self.log("train/alpha", alpha)

    def configure_callbacks(self) -> list[Callback]:
        """Supply averaging, seeds and the writer of predictions, unless the user gives them."""
        own: list[Callback] = [] if self.teacher is None else [EMACallback()]
        own += [StepSeedCallback()] if self.writer is None else [StepSeedCallback(), self.writer()]
        return missing_callbacks(self.trainer.callbacks, *own)  # type: ignore[attr-defined]

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` averages after each optimizer step; nothing without a teacher."""
        if self.momentum is None or self.teacher is None:
            return {}
        return {"teacher": EMAPair(source="student", target="teacher", momentum=self.momentum.momentum)}

    def load_initial_weights(self) -> None:
        """Load `weights`."""
        initial_weights.start(self, self.weights, self.task_weights())

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return how `weights` expect images to be prepared, if they record it."""
        return None if self.weights is None else preprocessing_of_checkpoint(self.weights)

    def text_towers(self) -> Iterable[TextTower]:
        """Return the BERTs of student and teacher."""
        return [network.text_encoder for network in self.sharded_networks()]

    def sharded_networks(self) -> Sequence[Any]:
        """Return the student, and the teacher if there is one."""
        return [self.student] if self.teacher is None else [self.student, self.teacher]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas)

    def paper_schedule(self) -> Schedule:
        """Return warm-up and cosine, or the authors' staircase."""
        return paper_schedule(self.optim, trainer_of(self))

    def pretrained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state without redundant names, which safetensors refuses."""
        return initial_weights.without_shared(state)

    def load_pretrained_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load the state of an export or of a checkpoint."""
        initial_weights.load_task(self, state, source, initial_weights.COMPLETE)
