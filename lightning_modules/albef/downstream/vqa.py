"""Visual question answering: an answer decoder on top of ALBEF (section 5 of the paper)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....callbacks import AnswerWriter
from ....callbacks.distributed.collectives import all_reduce_max
from ....common.errors import UserError
from ...base.example_batch import image_batch, text_length
from ...core.memory import in_slices
from ...evaluation.generated_texts import AnswerEvaluation
from ...evaluation.protocol import Batch
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..losses import mean_count
from ..mlm import check_special_tokens
from ..settings import (
    AnswerSettings,
    MemorySettings,
    TaskMomentumSettings,
    TaskVisionSettings,
    TextSettings,
    VQAOptimSettings,
)
from .answers import Answers, Questions, answer_loss, answer_maps, generate_answers, rank_answers, token_logits
from .network import VQANetwork
from .task import TaskMethod
from .weights import with_decoder


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
        answers = Answers(
            batch["answer_ids"],
            batch["answer_mask"],
            batch["answer_index"],
            batch["answer_weight"],
            batch["answer_positions"],
        )
        logits = token_logits(self.student, self._encode(self.student, batch), answers)
        teacher_logits = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher_logits = token_logits(self.teacher, self._encode(self.teacher, batch), answers)
        loss = answer_loss(logits, teacher_logits, answers, alpha, self._questions(batch))
        self.log_step(loss, alpha)
        return loss

    def _encode(self, network: VQANetwork, batch: Batch) -> Questions:
        """Encode the questions of a batch, each image once."""
        image = batch["image"]
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        slice_rows = self.memory.micro_batch_size
        if "image_index" not in batch:

            def encode_rows(image: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
                return (network.encode_text(ids, mask, network.encode_image(image)),)

            return Questions(in_slices(encode_rows, slice_rows, image, ids, mask)[0], mask)
        (tokens,) = in_slices(lambda image: (network.encode_image(image),), slice_rows, image)
        # All processes have the same number of slices for any number of questions: sharded networks communicate.
        sizes = slice_rows and [len(rows) for rows in ids.tensor_split(math.ceil(len(image) / slice_rows))]

        def encode_questions(ids: Tensor, mask: Tensor, image_index: Tensor) -> tuple[Tensor]:
            return (network.encode_text(ids, mask, tokens, image_index),)

        return Questions(in_slices(encode_questions, sizes, ids, mask, batch["image_index"])[0], mask)

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

        `image_index`, long [Q], is the image of each question; None if question b belongs to image b.
        """
        tokens = self.student.encode_image(image)
        return Questions(self.student.encode_text(input_ids, attention_mask, tokens, image_index), attention_mask)

    def answer_questions(self, batch: Batch) -> dict[str, Any]:
        """Answer the questions of a batch, for `AnswerEvaluation`; every process calls this.

        Args:
            batch: `image` [I, 3, S, S], `input_ids` and `attention_mask` [Q, Lq], and `image_index` [Q].

        Returns:
            `top_answers`, for each question its best answers, best first; `top_probabilities` [Q, n], of the answers
            among the candidates, or for written answers the geometric mean of the tokens' probabilities; and
            `answer_ids` [Q, L] of the best, with [CLS] and [SEP].

        Raises:
            UserError: If the datamodule has no questions.
        """
        data = self.datamodule
        if data is None or not hasattr(data, "encoded_answers"):
            raise UserError(
                f"Expected a datamodule of questions, which has a list of answers or decodes what is written, got "
                f"{type(data).__name__}: use VQADataModule."
            )
        questions = self(*_equal_counts(batch))
        count = len(batch["input_ids"])
        if self.answers.how == "generate" or not data.answers:
            return self._written_answers(questions, count, data)
        return self._listed_answers(questions, count, data)

    def _written_answers(self, questions: Questions, count: int, data: Any) -> dict[str, Any]:
        """Answer the first `count` questions by beam search."""
        text = self.text
        written, score = generate_answers(
            self.student,
            questions,
            text.cls_token_id,
            text.sep_token_id,
            self.answers.beams,
            self.answers.max_tokens,
        )
        start = torch.full_like(written[:, :1], text.cls_token_id)
        ids = pad(torch.cat([start, written], 1), (0, 1), value=text.sep_token_id)
        after_end = (ids == text.sep_token_id).cumsum(1) > 1
        return {
            "top_answers": [[answer] for answer in data.decode_answers(written[:count].cpu())],
            "top_probabilities": score[:count, None].exp(),
            "answer_ids": ids.masked_fill(after_end, text.pad_token_id)[:count],
        }

    def _listed_answers(self, questions: Questions, count: int, data: Any) -> dict[str, Any]:
        """Answer the first `count` questions from the data's list."""
        listed = {name: tensor.to(questions.mask.device) for name, tensor in data.encoded_answers.items()}
        ranked = rank_answers(
            self.student,
            questions,
            listed["answer_ids"],
            listed["answer_mask"],
            self.answers.candidates,
            self.answers.block,
            self.answers.first_token_twice,
        )
        best = ranked.answer[:count, : self.answers.top]
        return {
            "top_answers": [[data.answers[index] for index in row] for row in best.tolist()],
            "top_probabilities": ranked.probability[:count, : self.answers.top],
            "answer_ids": listed["answer_ids"][best[:, 0]],
        }

    def answer_maps(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor, answer_ids: Tensor) -> Tensor:
        """Return Grad-CAM maps [B, g, g] of answers [B, L] to questions [B, Lq] about images; in eval mode."""
        return answer_maps(self.student, image, input_ids, attention_mask, answer_ids, self.text.pad_token_id)

    def convert_weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Start the decoder from the fusion layers, embeddings and language-model head of a trained ALBEF."""
        return with_decoder(state, self.text.depth)

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the special token ids with the data's."""
        super().on_fit_start()
        check_special_tokens(self.datamodule, self.text)

    def text_towers(self) -> Iterable[VQANetwork]:
        """Return student and teacher, which have words in the question encoder and the decoder."""
        return self.sharded_networks()

    def module_methods(self) -> Sequence[str]:
        """Return the methods that answer questions and explain answers."""
        return "answer_questions", "answer_maps"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return images with questions and answers with the shapes of a training, for `vlightning plan`."""
        per_image = data.get("questions_per_image") or 1
        questions = example_questions(rows * per_image, text_length(self, data))
        if per_image > 1:
            questions["image_index"] = torch.arange(rows * per_image) // per_image
        return {"image": image_batch(self, rows, data)["image"]} | questions


def example_questions(questions: int, length: int) -> dict[str, Tensor]:
    """Return questions of some tokens, with three answers of five tokens each; ten people give about three."""
    answers_each = 3
    answer_length = 5
    predicted_tokens = 3
    ids = torch.zeros(questions, length, dtype=torch.long)
    answer_ids = torch.zeros(questions * answers_each, answer_length, dtype=torch.long)
    question_index = torch.arange(questions)
    return {
        "input_ids": ids,
        "attention_mask": ids.clone(),
        "sample_index": question_index,
        "answer_ids": answer_ids,
        "answer_mask": torch.ones_like(answer_ids),
        "answer_index": question_index.repeat_interleave(answers_each),
        "answer_weight": torch.ones(len(answer_ids)),
        "answer_positions": torch.arange(len(answer_ids) * predicted_tokens),
    }


def _equal_counts(batch: Batch) -> tuple[Tensor, ...]:
    """Return images, ids, masks and image indices, filled up to the same number of questions in every process.

    There is at least one image and one question: sharded processes run the same layers, and the layers cannot reshape
    an empty batch.
    """
    image = batch["image"]
    ids = batch["input_ids"]
    missing = max(int(all_reduce_max(torch.tensor(len(ids)))), 1) - len(ids)
    return (
        image if len(image) else image.new_zeros(1, *image.shape[1:]),
        pad(ids, (0, 0, 0, missing)),
        pad(batch["attention_mask"], (0, 0, 0, missing), value=1),
        pad(batch["image_index"], (0, missing)),
    )
