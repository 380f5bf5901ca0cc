"""Visual entailment (SNLI-VE): whether an image entails, contradicts or leaves open a text (section 5 of the paper)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from ....callbacks import ClassPredictionWriter, EMACallback, EMAPair, StepSeedCallback, missing_callbacks
from ...base.method import Method
from ...base.preprocessing import preprocessing_of_checkpoint
from ...base.settings import settings
from ...base.trainers import trainer_of
from ...evaluation.classification import ClassificationEvaluation, check_classes
from ...evaluation.protocol import Batch
from ...optim.adamw import adamw
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ...optim.schedules import Schedule
from ..network import FusionBert
from ..schedule import paper_schedule
from ..settings import MemorySettings, TextSettings
from ..teacher import copy_student, ramped_alpha, teacher_text
from . import weights as initial_weights
from .distillation import distilled_loss
from .network import TaskNetwork, class_head
from .settings import EntailmentMomentumSettings, TaskOptimSettings, TaskVisionSettings

TASK = initial_weights.TaskWeights(new=("cls_head.",))


class EntailmentModule(Method):
    """Classification of an image with a text into contradiction (0), neutral (1) and entailment (2).

    Defaults are the paper's.

    Args:
        vision: the image encoder. text: the text and fusion encoder. momentum: the momentum teacher and its soft
        targets. optim: AdamW and its learning rate. memory: activation memory. weights: initial weights of student and
        teacher: a checkpoint of the authors (pre-training or of this task), of `ALBEFModule` or of this class, or the
            folder of an export.
        num_classes: number of classes.
        optimizer: replaces AdamW. lr_scheduler: replaces the paper's schedule.
    """

    def __init__(
        self,
        vision: TaskVisionSettings = TaskVisionSettings(),
        text: TextSettings = TextSettings(),
        momentum: EntailmentMomentumSettings = EntailmentMomentumSettings(),
        optim: TaskOptimSettings = TaskOptimSettings(),
        memory: MemorySettings = MemorySettings(),
        weights: str | None = None,
        num_classes: int = 3,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.vision = vision = settings(TaskVisionSettings, vision)
        self.text = text = settings(TextSettings, text)
        self.momentum = momentum = settings(EntailmentMomentumSettings, momentum)
        self.optim = settings(TaskOptimSettings, optim)
        self.memory = memory = settings(MemorySettings, memory)
        self.weights, self.num_classes = weights, num_classes
        self.save_settings()
        initial_weights.check_sources(vision, text)

        head = class_head(text.width, num_classes)
        self.student = TaskNetwork(vision, text, head, activation_checkpointing=memory.activation_checkpointing)
        self.teacher: TaskNetwork | None = None
        if momentum.distill:
            self.teacher = TaskNetwork(vision, teacher_text(text, momentum), class_head(text.width, num_classes))
            copy_student(self.student, self.teacher)
        self.evaluation = ClassificationEvaluation(
            ("input_ids", "attention_mask", "image"), {"accuracy": 1}, keeps_result=True
        )
        self.start_vocabulary()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy, with the teacher's classes as soft targets."""
        alpha = self.current_alpha()
        loss = distilled_loss(
            self.student,
            self.teacher,
            self.memory.micro_batch_size,
            batch["label"],
            alpha,
            batch["input_ids"],
            batch["attention_mask"],
            batch["image"],
        )
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/alpha", alpha)
        return loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, image: Tensor) -> Tensor:
        """Return logits [B, C] of texts, ids and mask [B, L], with images [B, 3, S, S]."""
        logits: Tensor = self.student(input_ids, attention_mask, image)
        return logits

    def current_alpha(self) -> float:
        """Return the weight of the teacher's soft targets in this batch; 0 without a teacher."""
        return ramped_alpha(self.trainer, self.momentum) if self.momentum.distill else 0.0

    def configure_callbacks(self) -> list[Callback]:
        """Supply averaging, seeds and the writer of predictions, unless the user gives them."""
        own: list[Callback] = [EMACallback()] if self.momentum.distill else []
        own += [StepSeedCallback(), ClassPredictionWriter()]
        return missing_callbacks(self.trainer.callbacks, *own)  # type: ignore[attr-defined]

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` averages after each optimizer step; nothing without a teacher."""
        pair = EMAPair(source="student", target="teacher", momentum=self.momentum.momentum)
        return {"teacher": pair} if self.momentum.distill else {}

    def load_initial_weights(self) -> None:
        """Load `weights`."""
        initial_weights.start(self, self.weights, TASK)

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the number of classes with the data's."""
        super().on_fit_start()
        check_classes(self, self.num_classes)

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return how `weights` expect images to be prepared, if they record it."""
        return None if self.weights is None else preprocessing_of_checkpoint(self.weights)

    def text_towers(self) -> Iterable[FusionBert]:
        """Return the BERTs of student and teacher."""
        return [network.text_encoder for network in self.sharded_networks()]

    def sharded_networks(self) -> Sequence[TaskNetwork]:
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
