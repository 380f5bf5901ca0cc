"""Visual question answering: an answer decoder on top of ALBEF (section 5 of the paper)."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....callbacks import AnswerWriter
from ...core.memory import in_slices
from ...evaluation.generated_texts import AnswerEvaluation
from ...evaluation.protocol import Batch
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..counts import mean_count
from ..mlm import check_special_tokens
from ..settings import MemorySettings, TextSettings
from . import answer_maps as maps
from . import weights as initial_weights
from .answering import answered
from .answers import Answers, Questions, answer_loss, token_logits
from .official import with_decoder
from .settings import AnswerSettings, TaskMomentumSettings, TaskVisionSettings, VQAOptimSettings
from .task import TaskMethod
from .vqa_network import VQANetwork


class VQAModule(TaskMethod):
    """Generation of answers to questions about images; answers come from a list, or are written.

    Defaults are the paper's.

    Args:
        vision: the image encoder.
        text: the question encoder, whose fusion layers the answer decoder resembles.
        momentum: the momentum teacher and its soft targets.
        optim: AdamW and its learning rate.
        memory: activation memory; slices divide images and questions.
        answers: how questions are answered.
        weights: initial weights of student and teacher: a checkpoint of the authors (pre-training or of this task), of
            `ALBEFModule` or of this class, or the folder of an export.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the paper's schedule.
    """

    optim: VQAOptimSettings
    answers: AnswerSettings
    writer = AnswerWriter

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
        self.take_arguments(locals())
        self.weights = weights

        self.build(lambda text, recompute: VQANetwork(self.vision, text, recompute))
        self.evaluation = AnswerEvaluation()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of generating the answers, weighted by how many people gave them, with soft targets."""
        alpha = self.current_alpha()
        answers = Answers._make(batch[f"answer_{name}"] for name in ("ids", "mask", "index", "weight", "places"))
        logits = token_logits(self.student, self._encode(self.student, batch), answers)
        soft = None
        if self.teacher is not None:
            with torch.no_grad():
                soft = token_logits(self.teacher, self._encode(self.teacher, batch), answers)
        loss = answer_loss(logits, soft, answers, alpha, self._questions(batch))
        self.log_step(loss, alpha)
        return loss

    def _encode(self, network: VQANetwork, batch: Batch) -> Questions:
        image, ids, mask = batch["image"], batch["input_ids"], batch["attention_mask"]
        slice_rows = self.memory.micro_batch_size
        if "image_index" not in batch:

            def encode_rows(image: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
                return (network.encode_text(ids, mask, network.encode_image(image)),)

            return Questions(in_slices(encode_rows, slice_rows, image, ids, mask)[0], mask)
        (tokens,) = in_slices(lambda image: (network.encode_image(image),), slice_rows, image)
        # All processes have the same number of slices for any number of questions: sharded networks communicate.
        sizes = slice_rows and [len(part) for part in ids.tensor_split(math.ceil(len(image) / slice_rows))]
        (states,) = in_slices(
            lambda *rows: (network.encode_text(rows[0], rows[1], tokens, rows[2]),),
            sizes,
            *(ids, mask, batch["image_index"]),
        )
        return Questions(states, mask)

    @staticmethod
    def _questions(batch: Batch) -> Tensor | int:
        """Return the number of questions; where batches differ in it, the mean of the processes."""
        count = len(batch["input_ids"])
        if "image_index" not in batch:
            return count
        return mean_count(torch.full((), count, device=batch["image"].device), torch.float32)

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

    def task_weights(self) -> initial_weights.TaskWeights:
        """Return that the fusion layers, embeddings and head of a trained ALBEF start the decoder."""
        return initial_weights.TaskWeights(new=(), convert=partial(with_decoder, depth=self.text.depth))

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the special token ids with the data's."""
        super().on_fit_start()
        check_special_tokens(self.datamodule, self.text)

    def text_towers(self) -> Iterable[VQANetwork]:
        """Return student and teacher, which have words in the question encoder and the decoder."""
        return self.sharded_networks()
