"""Bases of the tasks' methods: a student, its momentum teacher, and a start from a trained ALBEF; classification."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from ....callbacks import ClassPredictionWriter, EMACallback, EMAPair, StepSeedCallback, missing_callbacks
from ....common.errors import UserError
from ...base.example_batch import pair_batch
from ...base.method import Method
from ...base.vocabulary import TextTower
from ...core.checkpoints import preprocessing_of_checkpoint
from ...core.memory import in_slices
from ...core.trainers import callbacks_of, trainer_of
from ...evaluation.classification import ClassificationEvaluation
from ...evaluation.protocol import Batch
from ...losses.soft_targets import soft_cross_entropy
from ...optim.optimizers import adamw
from ...optim.schedules import Schedule
from ..export import write_official
from ..network import copy_student
from ..official import TRAINING_STATE
from ..schedule import paper_schedule, ramped_alpha
from ..settings import MemorySettings, TaskMomentumSettings, TaskOptimSettings, TextSettings, VisionSettings
from ..weights import load_networks, read_trained, without_tied
from .network import TaskNetwork


class TaskMethod(Method):
    """Base of the methods that fine-tune a trained ALBEF.

    A task's constructor sets the groups of settings below and `weights`, and calls `build`; a task defines
    `training_step`, and which weights it takes of a trained ALBEF.
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
    """Callback that writes the results of `predict`."""
    new_weights: ClassVar[tuple[str, ...]] = ()
    """Prefixes of a network's tensors, such as "cls_head.", that `weights` may lack and that then start at random."""
    unused_weights: ClassVar[tuple[str, ...]] = ("vision_proj.", "text_proj.", "text_encoder.cls.")
    """Prefixes of the tensors of a trained ALBEF that the task does not have."""

    def build(self, network: Callable[[TextSettings, bool], nn.Module]) -> None:
        """Build the student and, with distillation, its teacher; then adopt the vocabulary of `weights`.

        Args:
            network: from the settings of the text encoder, and whether blocks recompute their activations.

        Raises:
            UserError: If the weights of an encoder are named, which a task would not load.
        """
        sources = (self.vision.weights, self.text.weights)
        if sources != (None, None):
            raise UserError(
                f"Expected a trained ALBEF to start a task from, got vision.weights {sources[0]!r} and text.weights "
                f"{sources[1]!r}: set model.weights, and the latter to null."
            )
        self.student = network(self.text, self.memory.activation_checkpointing)
        self.teacher = None
        if self.momentum is not None and self.momentum.distill:
            self.teacher = network(self.momentum.teacher_text(self.text), False)
            copy_student(self.student, self.teacher)
        self.start_vocabulary()

    def convert_weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make the task's networks from those of a trained ALBEF, under the names of this package.

        A state of the task is returned as it is.
        """
        return state

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
        required: list[Callback] = [StepSeedCallback()]
        if self.teacher is not None:
            required.insert(0, EMACallback())
        if self.writer is not None:
            required.append(self.writer())
        return missing_callbacks(callbacks_of(self), *required)

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return the pairs that `EMACallback` averages after each optimizer step; nothing without a teacher."""
        if self.momentum is None or self.teacher is None:
            return {}
        return {"teacher": EMAPair(source="student", target="teacher", momentum=self.momentum.momentum)}

    def load_initial_weights(self) -> None:
        """Load `weights` into student and teacher, and log what was loaded and what was not.

        Raises:
            UserError: If the source does not exist, is of another kind, or does not fit. Nothing is loaded then.
        """
        name = type(self).__name__
        if self.weights is None:
            rank_zero_info(f"{name} starts at random: set model.weights to a trained ALBEF.")
            return
        state, source, name_in_source = read_trained(self.weights, self.text.depth)
        expected = self.state_dict()
        unused = tuple(f"{network}.{prefix}" for network in ("student", "teacher") for prefix in self.unused_weights)
        without_teacher = ("teacher.",) if self.teacher is None else ()
        loaded = {
            key: tensor
            for key, tensor in self.convert_weights(state).items()
            if key in expected
            or not key.startswith(("temperature", "itm_head.", *TRAINING_STATE, *unused, *without_teacher))
        }
        teacher_start = "weights" if self.momentum is None else self.momentum.start
        notes = load_networks(self, loaded, source, self.new_weights, teacher_start, name_in_source)
        rank_zero_info(f"{name} starts with {', '.join([source, *notes])}.")

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
        """Return the state without second names of tied tensors."""
        return without_tied(state)

    def load_pretrained_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load the state of an export or of a checkpoint."""
        load_networks(self, state, source)

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
        return write_official(cls, f"layout of {cls.__name__}", content, source, target)


class ClassificationTask(TaskMethod):
    """Base of the tasks that classify a text with its image or images."""

    inputs: ClassVar[tuple[str, ...]]
    """Entries of a batch that `forward` takes: `input_ids`, `attention_mask` and the images."""
    writer = ClassPredictionWriter
    new_weights = ("cls_head.",)

    def build_classifier(self, classes: int) -> None:
        """Build the networks with a head of the authors' for C classes, and the evaluation."""

        def network(text: TextSettings, recompute: bool) -> TaskNetwork:
            head = nn.Sequential(nn.Linear(text.width, text.width), nn.ReLU(), nn.Linear(text.width, classes))
            return TaskNetwork(self.vision, text, head, len(self.inputs) - 2, recompute)

        self.build(network)
        self.evaluation = ClassificationEvaluation(self.inputs, {"accuracy": 1}, keeps_result=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return (1 - alpha) CE(label) + alpha CE(teacher's classes), a mean over the samples (section 3.3)."""
        alpha = self.current_alpha()
        inputs = [batch[name] for name in self.inputs]
        slice_rows = self.memory.micro_batch_size
        (logits,) = in_slices(lambda *rows: (self.student(*rows),), slice_rows, *inputs)
        loss = F.cross_entropy(logits, batch["label"])
        if self.teacher is not None:
            with torch.no_grad():
                (teacher_logits,) = in_slices(lambda *rows: (self.teacher(*rows),), slice_rows, *inputs)
            soft = soft_cross_entropy(logits.log_softmax(-1), teacher_logits.softmax(-1)).mean()
            loss = (1 - alpha) * loss + alpha * soft
        self.log_step(loss, alpha)
        return loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *images: Tensor) -> Tensor:
        """Return logits [B, C] of texts, ids and mask [B, L], with their images, each [B, 3, S, S]."""
        logits: Tensor = self.student(input_ids, attention_mask, *images)
        return logits

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return texts with images with the shapes of a training, for `vlightning plan`.

        Texts that the data do not truncate have at most 40 tokens: 30 words, some of several tokens.
        """
        return pair_batch(self, rows, data, self.inputs[2:], longest=40)
