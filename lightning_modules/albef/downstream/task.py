"""The base of the tasks' methods: a student, its momentum teacher, and a start from a trained ALBEF."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from ....callbacks import EMACallback, EMAPair, StepSeedCallback, missing_callbacks
from ...base.example_batch import pair_batch
from ...base.method import Method
from ...base.vocabulary import TextTower
from ...core.checkpoints import preprocessing_of_checkpoint
from ...core.memory import in_slices
from ...core.trainers import trainer_of
from ...losses.soft_targets import soft_cross_entropy
from ...optim.optimizers import adamw
from ...optim.schedules import Schedule
from ..export import write_official
from ..network import copy_student
from ..schedule import paper_schedule, ramped_alpha
from ..settings import MemorySettings, TaskMomentumSettings, TaskOptimSettings, TextSettings, VisionSettings
from . import weights as initial_weights
from .official import save_official

LONGEST_EXAMPLE = 40
"""Tokens of the longest text of an example batch, where data do not truncate: 30 words, some of several tokens."""


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
            UserError: If the weights of an encoder are named, which a task would not load.
        """
        initial_weights.check_sources(self.vision, self.text)
        self.student = network(self.text, self.memory.activation_checkpointing)
        self.teacher = None
        if self.momentum is not None and self.momentum.distill:
            self.teacher = network(self.momentum.teacher_text(self.text), False)
            copy_student(self.student, self.teacher)
        self.start_vocabulary()

    @abstractmethod
    def task_weights(self) -> initial_weights.TaskWeights:
        """Return which weights of a trained ALBEF a task takes, and how it renames them."""

    def current_alpha(self) -> float:
        """Return the weight of the teacher's soft targets in this batch; 0 without a teacher."""
        if self.momentum is None or self.teacher is None:
            return 0.0
        return ramped_alpha(self.trainer, self.momentum)

    def distilled_loss(self, alpha: float, label: Tensor, *inputs: Tensor) -> Tensor:
        """Classify a batch, and return (1 - alpha) CE(label) + alpha CE(teacher's classes), a mean over the samples.

        Args:
            alpha: weight of the teacher's soft targets (section 3.3); without a teacher there are none.
            label: long [B].
            *inputs: what the networks classify, tensors [B, ...].
        """
        slice_rows = self.memory.micro_batch_size
        logits = classify(self.student, slice_rows, *inputs)
        hard = F.cross_entropy(logits, label)
        if self.teacher is None:
            return hard
        with torch.no_grad():
            targets = classify(self.teacher, slice_rows, *inputs).softmax(-1)
        return (1 - alpha) * hard + alpha * soft_cross_entropy(logits.log_softmax(-1), targets).mean()

    @torch.compiler.disable  # logging a name for the first time would compile the whole step again
    def log_step(self, loss: Tensor, alpha: float | None = None) -> None:
        """Log the loss of a step, and the weight of the soft targets."""
        self.log("train/loss", loss.detach(), prog_bar=True)
        if alpha is not None:
            self.log("train/alpha", alpha)

    def configure_callbacks(self) -> list[Callback]:
        """Supply averaging, seeds and the writer of predictions, unless the user gives them."""
        required: list[Callback] = [StepSeedCallback()]
        if self.teacher is not None:
            required.insert(0, EMACallback())
        if self.writer is not None:
            required.append(self.writer())
        return missing_callbacks(self.trainer.callbacks, *required)  # type: ignore[attr-defined]

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

    def network_methods(self) -> Sequence[str]:
        """Return the methods of student and teacher that use their parameters."""
        return "encode_image", "project_image", "encode_text", "fuse", "decode", "predict_words"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs of images and texts with the shapes of a training, for `vlightning plan`."""
        return pair_batch(self, rows, data)

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return super().layouts() | {"albef": "a .pth file in the authors' layout of the task"}

    @classmethod
    def write_layout(cls, content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
        """Write the model of a checkpoint in a layout of the method's own."""
        return write_official(cls, save_official, f"layout of {cls.__name__}", content, source, target)


def classify(network: nn.Module, slice_rows: int | None, *inputs: Tensor) -> Tensor:
    """Return logits [B, C] of a network's inputs, of which `slice_rows` rows pass at a time; None for all at once."""

    def classify_rows(*rows: Tensor) -> tuple[Tensor]:
        return (network(*rows),)

    return in_slices(classify_rows, slice_rows, *inputs)[0]
