"""Visual question answering: an answer decoder on top of ALBEF (section 5 of the paper)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from ....callbacks import AnswerWriter, EMACallback, EMAPair, StepSeedCallback, missing_callbacks
from ...base.method import Method
from ...base.preprocessing import preprocessing_of_checkpoint
from ...base.settings import settings
from ...base.trainers import trainer_of
from ...evaluation.answers import AnswerEvaluation
from ...evaluation.protocol import Batch
from ...memory import in_slices
from ...optim.adamw import adamw
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ...optim.schedules import Schedule
from ..mlm import check_special_tokens
from ..schedule import paper_schedule
from ..settings import MemorySettings, TextSettings
from ..teacher import copy_student, ramped_alpha, teacher_text
from . import answer_maps as maps
from . import weights as initial_weights
from .answering import answered
from .answers import Answers, Questions, answer_loss, token_logits
from .official import with_decoder
from .settings import AnswerSettings, TaskMomentumSettings, TaskVisionSettings, VQAOptimSettings
from .vqa_network import VQANetwork


class VQAModule(Method):
    """Generation of answers to questions about images; answers come from a list, or are written.

    Defaults are the paper's.

    Args:
        vision: the image encoder. text: the question encoder, whose fusion layers the answer decoder resembles.
        momentum: the momentum teacher and its soft targets. optim: AdamW and its learning rate. memory: activation
        memory; slices divide images and questions. answers: how questions are answered. weights: initial weights of
        student and teacher: a checkpoint of the authors (pre-training or of this task), of `ALBEFModule` or of this
            class, or the folder of an export.
        optimizer: replaces AdamW. lr_scheduler: replaces the paper's schedule.
    """

    def __init__(
        self,
        vision: TaskVisionSettings = TaskVisionSettings(),
        text: TextSettings = TextSettings(),
        momentum: TaskMomentumSettings = TaskMomentumSettings(),
        optim: VQAOptimSettings = VQAOptimSettings(),
        memory: MemorySettings = MemorySettings(),
        answers: AnswerSettings = AnswerSettings(),
        weights: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.vision = vision = settings(TaskVisionSettings, vision)
        self.text = text = settings(TextSettings, text)
        self.momentum = momentum = settings(TaskMomentumSettings, momentum)
        self.optim = settings(VQAOptimSettings, optim)
        self.memory = memory = settings(MemorySettings, memory)
        self.answers = settings(AnswerSettings, answers)
        self.weights = weights
        self.save_settings()

        self.student = VQANetwork(vision, text, memory.activation_checkpointing)
        self.teacher: VQANetwork | None = None
        if momentum.distill:
            self.teacher = VQANetwork(vision, teacher_text(text, momentum))
            copy_student(self.student, self.teacher)
        self.evaluation = AnswerEvaluation()
        self.start_vocabulary()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of generating the answers, weighted by how many people gave them, with soft targets."""
        alpha = self.current_alpha()
        answers = Answers._make(batch[f"answer_{name}"] for name in ("ids", "mask", "index", "weight", "places"))
        logits = token_logits(self.student, self._encode(self.student, batch), answers)
        soft = None
        if self.teacher is not None:
            with torch.no_grad():
                soft = token_logits(self.teacher, self._encode(self.teacher, batch), answers)
        loss = answer_loss(logits, soft, answers, alpha, len(batch["image"]))
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/alpha", alpha)
        return loss

    def _encode(self, network: VQANetwork, batch: Batch) -> Questions:
        def encode_rows(image: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
            return (network.encode_text(ids, mask, network.encode_image(image)),)

        inputs = batch["image"], batch["input_ids"], batch["attention_mask"]
        return Questions(in_slices(encode_rows, self.memory.micro_batch_size, *inputs)[0], batch["attention_mask"])

    def current_alpha(self) -> float:
        """Return the weight of the teacher's soft targets in this batch; 0 without a teacher."""
        return ramped_alpha(self.trainer, self.momentum) if self.momentum.distill else 0.0

    # Evaluation and use

    def forward(
        self, image: Tensor, input_ids: Tensor, attention_mask: Tensor, image_index: Tensor | None = None
    ) -> Questions:
        """Encode questions, ids and mask [Q, Lq], about images [B, 3, S, S]; each image is encoded once.

        Args:
            image: [B, 3, S, S].
            input_ids: long [Q, Lq].
            attention_mask: [Q, Lq].
            image_index: long [Q], the image of each question; None if question b belongs to image b.
        """
        tokens = self.student.encode_image(image)
        return Questions(self.student.encode_text(input_ids, attention_mask, tokens, image_index), attention_mask)

    def answer_questions(self, batch: Batch) -> dict[str, Any]:
        """Answer the questions of a batch, for `AnswerEvaluation`: the best answers and their probabilities."""
        return answered(self, batch, self.datamodule)

    def answer_maps(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor, answer_ids: Tensor) -> Tensor:
        """Return Grad-CAM maps [B, g, g] of what an answer [B, L] to a question [B, Lq] looked at; in eval mode."""
        return maps.answer_maps(self.student, image, input_ids, attention_mask, answer_ids, self.text.pad_token_id)

    # Start of a run

    def configure_callbacks(self) -> list[Callback]:
        """Supply averaging, seeds and the writer of predictions, unless the user gives them."""
        own: list[Callback] = [EMACallback()] if self.momentum.distill else []
        own += [StepSeedCallback(), AnswerWriter()]
        return missing_callbacks(self.trainer.callbacks, *own)  # type: ignore[attr-defined]

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` averages after each optimizer step; nothing without a teacher."""
        pair = EMAPair(source="student", target="teacher", momentum=self.momentum.momentum)
        return {"teacher": pair} if self.momentum.distill else {}

    def load_initial_weights(self) -> None:
        """Load `weights`; a trained ALBEF starts the decoder with its fusion layers, embeddings and head."""
        initial_weights.start(self, self.weights, self._task())

    def _task(self) -> initial_weights.TaskWeights:
        return initial_weights.TaskWeights(new=(), convert=partial(with_decoder, depth=self.text.depth))

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return how `weights` expect images to be prepared, if they record it."""
        return None if self.weights is None else preprocessing_of_checkpoint(self.weights)

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the special token ids with the data's."""
        super().on_fit_start()
        check_special_tokens(self.datamodule, self.text)

    def text_towers(self) -> Iterable[VQANetwork]:
        """Return student and teacher, which have words in the question encoder and the decoder."""
        return self.sharded_networks()

    def sharded_networks(self) -> Sequence[VQANetwork]:
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
