"""Base of the datamodules of questions about images: encoding of questions and answers, the list of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.contract import ListsAnswers
from ..base.mixing import Mix
from ..base.samples import TrainingSet
from ..base.stages import Split
from ..base.texts import TextDataModule
from ..transforms.normalize import in_pixels
from .samples import (
    QuestionCollate,
    QuestionEvaluationCollate,
    QuestionEvaluationSet,
    QuestionReader,
    QuestionRows,
    question_groups,
)
from .texts import QuestionEncoder, encode_answers, usable_answers

NO_LIMIT = 512
"""Longest question of an evaluation in tokens: what a BERT has positions for."""


class QuestionDataModule(TextDataModule, ListsAnswers):
    """Questions about images, each with the answers that people gave.

    Evaluation reads each image once, with all of its questions, and `eval_batch_size` counts images. A subclass
    defines the rows in `open_split`, and `answers`.

    Args:
        tokenizer: as in `TextDataModule`; one with [CLS] and [SEP]. A trained one is trained on the
            training questions and answers.
        max_tokens: longest question in training, in tokens (ALBEF: 25); in evaluation questions are not truncated.
        append_sep: whether questions end with [SEP]; the ALBEF authors omit it. Answers end with it in any case.
        clean_questions: whether to apply ALBEF's question cleaning.
        max_words: number of words that the cleaning keeps in training (ALBEF: 30).
        eval_max_words: number of words that it keeps in evaluation (ALBEF: 50).
        questions_per_image: most questions of an image that a training batch asks about one augmented version of it,
            which is encoded once for all of them (ALBEF: 1). Above 1, batch sizes of training count images, and an
            epoch still reads each question once.
        **options: see `TextDataModule`; captions and texts for prediction have no meaning here.
    """

    def __init__(
        self,
        *,
        append_sep: bool = False,
        clean_questions: bool = True,
        eval_max_words: Annotated[int, COUNT] = 50,
        questions_per_image: Annotated[int, COUNT] = 1,
        **options: Any,
    ) -> None:
        super().__init__(append_sep=append_sep, **options)
        if self.predict_texts:
            raise UserError(
                "Expected questions in data.predict, each with its image, got data.predict_texts: leave it out."
            )
        self.clean_questions = clean_questions
        self.eval_max_words = eval_max_words
        self.questions_per_image = questions_per_image
        self._grouped: tuple[Any, list[list[int]], Mix] | None = None
        self._encoded: dict[str, torch.Tensor] | None = None

    # Methods that the base class calls

    def encoder(self) -> QuestionEncoder:
        """Return the encoder of training questions."""
        return self._encoder(self.max_tokens, self.max_words)

    def _encoder(self, max_tokens: int, max_words: int) -> QuestionEncoder:
        return QuestionEncoder(self.tokenizer, max_tokens, self.clean_questions, max_words)

    def training_reader(self, rows: QuestionRows) -> QuestionReader:
        """Return a reader of an augmented image with a question, or several, and their answers."""
        groups = None if self.questions_per_image == 1 else self._groups(rows)[0]
        return QuestionReader(rows, self.worker_transform(training=True), self.encoder(), groups)

    def training_set(self, rows: QuestionRows) -> TrainingSet:
        """Return the dataset of training samples."""
        return TrainingSet(self.training_mix(rows).rows, self.training_reader(rows), self.run_seed)

    def training_mix(self, rows: QuestionRows) -> Mix:
        """Return how often an epoch reads the questions, or the groups of questions, of each source."""
        return self.question_mix(rows) if self.questions_per_image == 1 else self._groups(rows)[1]

    def question_mix(self, rows: Any) -> Mix:
        """Return how often an epoch reads the questions of each source; by default each once."""
        return Mix([len(rows)])

    def _groups(self, rows: QuestionRows) -> tuple[list[list[int]], Mix]:
        if self._grouped is None or self._grouped[0] is not rows:
            mix = self.question_mix(rows)
            groups, sizes = question_groups(rows, mix.sizes, self.questions_per_image)
            self._grouped = rows, groups, Mix(sizes, mix.weights)
        return self._grouped[1:]

    def training_collate(self) -> QuestionCollate:
        """Stack the images, encode questions and answers."""
        return QuestionCollate(self.encoder(), self.tokenizer, grouped=self.questions_per_image > 1)

    def evaluation_items(self, rows: QuestionRows) -> list[list[int]]:
        """Return the rows of each image."""
        return rows.images()

    def evaluation_set(self, rows: QuestionRows, items: list[list[int]], split: Split) -> QuestionEvaluationSet:
        """Return a dataset of images with all of their questions."""
        encoder = self._encoder(NO_LIMIT, self.eval_max_words)
        return QuestionEvaluationSet(rows, items, self.worker_transform(training=False), encoder, self.run_seed)

    def evaluation_collate(self) -> QuestionEvaluationCollate:
        """Stack the images, and encode all of their questions."""
        return QuestionEvaluationCollate(self._encoder(NO_LIMIT, self.eval_max_words), in_pixels(self.eval_transform))

    # For the module and callbacks

    @property
    def answers(self) -> Sequence[str]:
        """The answers that are ranked; empty if there is no list."""
        return ()

    @property
    def encoded_answers(self) -> dict[str, torch.Tensor]:
        """The answers as `answer_ids` and `answer_mask`, long [C, L]."""
        if self._encoded is None:
            self._encoded = self.encode_answers(self.answers)
        return self._encoded

    def encode_answers(self, answers: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return answers as `answer_ids` and `answer_mask`, long [A, L]."""
        return encode_answers(self.tokenizer, answers)

    def decode_answers(self, ids: torch.Tensor) -> list[str]:
        """Return the texts of token ids [Q, L], special tokens left out."""
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]

    def encoded_questions(self, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return questions as an evaluation reads them: `input_ids` and `attention_mask`, long [Q, L]."""
        return self._encoder(NO_LIMIT, self.eval_max_words)(questions)

    def question(self, split: Split, sample_index: int) -> str:
        """Return the raw question of a `sample_index`."""
        text: str = self._opened(split).question(sample_index)
        return text

    def given_answers(self, split: Split, sample_index: int) -> list[str]:
        """Return the usable answers that people gave to the question of a `sample_index`, perhaps none."""
        return usable_answers(self._opened(split).answers(sample_index))
