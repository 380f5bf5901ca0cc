"""Samples and batches of visual question answering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ..base.faults import BadSample, Collated, Fault, Outcome
from ..base.samples import Rows, SeededSet, Transform, empty_images, stacked, usable_samples
from ..base.sampling import sample_numbers, seeded
from ..text.captions import is_text
from ..text.tokenizers import Encoder, TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_DELETED = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")


def clean_question(question: str, max_words: int = 30) -> str:
    """Apply ALBEF's question cleaning (`pre_question` of the authors' code), which keeps runs of spaces.

    Args:
        question: raw text.
        max_words: number of space-separated words kept (authors: 30 in training, 50 at test); of a run of spaces, each
            but the first counts.
    """
    text = question.lower().translate(_DELETED).rstrip(" ")
    return " ".join(text.split(" ")[:max_words])


class QuestionEncoder(TextEncoder):
    """Encode questions as padded token ids, as `TextEncoder` does, but with `clean_question` as the cleaning."""

    def cleaned(self, caption: str, max_words: int) -> str:
        """Return a question after the cleaning, which keeps `max_words` words; the question if cleaning is off."""
        return clean_question(caption, max_words) if self.clean else caption

    def usable(self, caption: object) -> bool:
        """Return whether a question is a text that is not empty after the cleaning, if cleaning is on."""
        if not isinstance(caption, str) or not is_text(caption):
            return False
        return bool(self.cleaned(caption, self.max_words).strip())


def usable_answers(answers: Sequence[object]) -> list[str]:
    """Return the answers that are texts and not empty."""
    return [text for text in answers if isinstance(text, str) and text.strip() and is_text(text)]


def encode_answers(tokenizer: PreTrainedTokenizerFast, answers: Sequence[str]) -> dict[str, torch.Tensor]:
    """Encode answers as [CLS] text [SEP], padded and never truncated.

    Returns:
        `answer_ids` and `answer_mask`, long [len(answers), longest].
    """
    start, end, pad = (getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad"))
    texts = tokenizer(list(answers), add_special_tokens=False)["input_ids"] if answers else []
    longest = max((len(ids) for ids in texts), default=0) + 2
    ids = torch.full((len(texts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text) + 2] = torch.tensor([start, *text, end])
        mask[row, : len(text) + 2] = 1
    return {"answer_ids": ids, "answer_mask": mask}


EMPTY_QUESTION, NO_ANSWER = "empty question", "no answer"


class QuestionRows(Rows, Protocol):
    """Rows of an image, a question and its answers."""

    def question(self, row: int) -> str:
        """Return the raw question; raises `BadSample`."""

    def answers(self, row: int) -> list[str]:
        """Return the answers that people gave, raw, perhaps none; raises `BadSample`."""

    def answer_weight(self, row: int) -> float | None:
        """Return the weight of each distinct answer; None for its share of the answers."""

    def question_id(self, row: int) -> str:
        """Return the id of the question, or the index of the row; raises `BadSample`."""

    def images(self) -> list[list[int]]:
        """Return the rows of each image."""


class Question(NamedTuple):
    """A usable question with its distinct answers and their weights."""

    text: str
    answers: list[str]
    weights: list[float]
    sample_index: int


class Questions(NamedTuple):
    """An image with some of its usable questions, and the faults of the others."""

    image: torch.Tensor
    questions: list[Question]
    faults: list[Fault]


def question_groups(rows: QuestionRows, sizes: Sequence[int], most: int) -> tuple[list[list[int]], list[int]]:
    """Divide the rows of each image into groups of rows of one source, in the order of their first rows.

    Args:
        rows: rows of the split.
        sizes: number of rows of each source.
        most: largest number of rows of a group.

    Returns:
        The groups, and the number of groups of each source.
    """
    ends = np.cumsum(sizes)
    groups: dict[tuple[int, int], list[int]] = {}
    for image, image_rows in enumerate(rows.images()):
        for row, source in zip(image_rows, np.searchsorted(ends, image_rows, side="right").tolist(), strict=True):
            groups.setdefault((source, image), []).append(row)
    pieces = [
        (source, group[start : start + most])
        for (source, _), group in groups.items()
        for start in range(0, len(group), most)
    ]
    pieces.sort(key=lambda piece: piece[1][0])
    counts = Counter(source for source, _ in pieces)
    return [piece for _, piece in pieces], [counts[source] for source in range(len(sizes))]


def weighted_answers(rows: QuestionRows, row: int) -> tuple[list[str], list[float]]:
    """Return the distinct answers of a row, in their first order, and the weight of each.

    Raises:
        BadSample: If there is no usable answer.
    """
    answers = usable_answers(rows.answers(row))
    if not answers:
        raise BadSample(NO_ANSWER, rows.name(row))
    counts = Counter(answers)
    fixed = rows.answer_weight(row)
    weights = [count / len(answers) if fixed is None else fixed for count in counts.values()]
    return list(counts), weights


@dataclass
class QuestionReader:
    """Reader of training samples: an augmented image, a question or several, and the weighted answers of each.

    Args:
        rows: rows of the split.
        transform: image to float [3, H, W].
        encoder: decides which questions are usable.
        groups: the rows of each sample, on one image; None for a row in each.
    """

    rows: QuestionRows
    transform: Transform
    encoder: Encoder
    groups: Sequence[Sequence[int]] | None = None

    def __call__(self, row: int, numbers: tuple[int, int]) -> Questions:
        """Read a row or a group; arguments and errors as in `Reader`.

        A group is read without its unusable questions, if one is usable.
        """
        questions: list[Question] = []
        bad: list[BadSample] = []
        for question_row in [row] if self.groups is None else self.groups[row]:
            try:
                text = usable_question(self.rows, question_row, self.encoder)
                questions.append(Question(text, *weighted_answers(self.rows, question_row), question_row))
            except BadSample as error:
                bad.append(error)
        if not questions:
            raise bad[0]
        raw = self.rows.image(questions[0].sample_index)
        with seeded(numbers[0]):
            image = self.transform(raw)
        return Questions(image, questions, [error.fault for error in bad])


def usable_question(rows: QuestionRows, row: int, encoder: Encoder) -> str:
    """Return the raw question of a row.

    Raises:
        BadSample: If it is empty or cannot be read.
    """
    question = rows.question(row)
    if not encoder.usable(question):
        raise BadSample(EMPTY_QUESTION, rows.name(row))
    return question


@dataclass
class QuestionCollate:
    """Build training batches.

    `image` [B, 3, H, W], `input_ids` and `attention_mask` [B, L] of the questions, `sample_index` [B]; the
    answers of all questions, `answer_ids` and `answer_mask` [A, M], with `answer_index` [A], the question of
    each, `answer_weight` [A], and `answer_positions` [P], the indices in [A, M - 1] of tokens before another token.
    If `grouped`, there are several questions of an image: `image` [I, 3, H, W] and `image_index` [B].
    """

    encoder: Encoder
    tokenizer: Any
    grouped: bool = False

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, num_read, faults)
        asked = [question for sample in samples for question in sample.questions]
        unusable = [fault for sample in samples for fault in sample.faults]
        encoded = encode_answers(self.tokenizer, [answer for question in asked for answer in question.answers])
        answer_index = [index for index, question in enumerate(asked) for _ in question.answers]
        batch: dict[str, Any] = {
            "image": stacked([sample.image for sample in samples]),
            **self.encoder([question.text for question in asked]),
            "sample_index": torch.tensor([question.sample_index for question in asked]),
            **encoded,
            "answer_index": torch.tensor(answer_index),
            "answer_weight": torch.tensor([weight for question in asked for weight in question.weights]),
            "answer_positions": encoded["answer_mask"][:, 1:].flatten().nonzero()[:, 0],
        }
        if self.grouped:
            image_index = [index for index, sample in enumerate(samples) for _ in sample.questions]
            batch["image_index"] = torch.tensor(image_index)
        return Collated(batch, num_read + len(asked) + len(unusable) - len(samples), faults + unusable)


class Asked(NamedTuple):
    """An image with its usable questions: raw text, answers that people gave, id, and row of each."""

    image: torch.Tensor
    questions: list[tuple[str, list[str], str, int]]


@dataclass(eq=False)
class QuestionEvaluationSet(SeededSet):
    """Images of an evaluation split, each with all of its questions; unusable ones are skipped, never replaced.

    Arguments as in `EvaluationReader`, with the rows of each image.
    """

    rows: QuestionRows
    images: Sequence[Sequence[int]]
    transform: Transform
    encoder: Encoder
    seed: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, image: int) -> Outcome:
        rows = self.images[image]
        questions: list[tuple[str, list[str], str, int]] = []
        faults: list[Fault] = []
        for row in rows:
            try:
                question = usable_question(self.rows, row, self.encoder)
                answers = usable_answers(self.rows.answers(row))
                questions.append((question, answers, self.rows.question_id(row), row))
            except BadSample as bad:
                faults.append(bad.fault)
        if not questions:
            return Outcome(None, len(rows), faults)
        try:
            raw = self.rows.image(questions[0][3])
        except BadSample as bad:
            return Outcome(None, len(rows), [*faults, *([bad.fault] * len(questions))])
        with seeded(sample_numbers(self.seed, 0, questions[0][3])[0]):
            pixels = self.transform(raw)
        return Outcome(Asked(pixels, questions), len(rows), faults)


@dataclass
class QuestionEvaluationCollate:
    """Build evaluation batches: I images, and the Q questions of all of them.

    `image` [I, 3, H, W]; `input_ids` and `attention_mask` [Q, L]; `image_index` [Q], the image of each
    question; `sample_index` [Q], its row; and lists: `question` and `question_id`, texts, and `answers`, those
    that people gave, perhaps none.
    """

    encoder: Encoder
    transform: Transform

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        asked = [(index, *question) for index, sample in enumerate(samples) for question in sample.questions]
        columns = [list(column) for column in zip(*asked, strict=True)] if asked else [[], [], [], [], []]
        image_index, question, answers, question_id, row = columns
        batch: dict[str, Any] = {
            "image": stacked([sample.image for sample in samples]) if samples else empty_images(self.transform),
            **self.encoder(question),
            "image_index": torch.tensor(image_index, dtype=torch.long),
            "sample_index": torch.tensor(row, dtype=torch.long),
            "question": question,
            "question_id": question_id,
            "answers": answers,
        }
        return Collated(batch, num_read, faults)
