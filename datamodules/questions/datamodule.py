"""Datamodule of visual question answering: the lists of ALBEF's authors for VQA v2, and tables of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

from ...common.errors import UserError
from ...common.ranges import BELOW_ONE, COUNT, POSITIVE
from ..base.images import ImageTransforms
from ..base.mixing import Mix
from ..base.sampled import SampledDataModule
from ..base.samples import TrainingSet
from ..base.stages import Split
from ..base.text_files import ENCODING, parse_json
from ..base.texts import TokenizedTexts
from ..pairs.source_arguments import SourceArguments
from ..reading.layout import Layout
from ..transforms.normalize import in_pixels
from .rows import QuestionOpening, QuestionTable
from .samples import (
    QuestionCollate,
    QuestionEncoder,
    QuestionEvaluationCollate,
    QuestionEvaluationSet,
    QuestionReader,
    QuestionRows,
    encode_answers,
    question_groups,
    usable_answers,
)

NO_LIMIT = 512
"""Longest question of an evaluation in tokens: what a BERT has positions for."""


class QuestionDataModule(TokenizedTexts, ImageTransforms, SampledDataModule):
    """Questions about images, each with the answers that people gave.

    Evaluation reads each image once, with all of its questions, and `eval_batch_size` counts images. A subclass
    defines the rows in `open_split`, and `answers`. The options `clean_captions`, `pad_to_multiple_of` and
    `predict_texts` have no effect on questions; the last one is refused.

    Args:
        tokenizer: hub name, local folder, BERT `vocab.txt` or `tokenizer.json` of a tokenizer with [CLS] and [SEP]; by
            default a WordPiece tokenizer is trained on the training questions and answers.
        max_tokens: longest question in training, in tokens (ALBEF: 25); in evaluation questions are not truncated.
        append_sep: whether questions end with [SEP]; the ALBEF authors omit it. Answers end with it in any case.
        clean_questions: whether to apply ALBEF's question cleaning.
        max_words: number of words that the cleaning keeps in training (ALBEF: 30).
        eval_max_words: number of words that it keeps in evaluation (ALBEF: 50).
        questions_per_image: most questions of an image that a training batch asks about one augmented version of it,
            which is encoded once for all of them (ALBEF: 1). Above 1, batch sizes of training count images, and an
            epoch still reads each question once.
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
        return super().training_mix(rows) if self.questions_per_image == 1 else self._groups(rows)[1]

    def _groups(self, rows: QuestionRows) -> tuple[list[list[int]], Mix]:
        if self._grouped is None or self._grouped[0] is not rows:
            mix = super().training_mix(rows)
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

    def evaluation_collate(self, split: Split) -> QuestionEvaluationCollate:
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


class VQADataModule(SourceArguments, QuestionDataModule):
    """Questions about images in JSON, JSON lines, CSV or Parquet.

    A row has an `image` (a path; in Parquet also the encoded image), a `question`, and `answers` or `answer`, a
    text or a list of texts; optionally `question_id`, and `dataset`, which selects the folder of the images. These
    are the lists of ALBEF's authors. A test without answers has no accuracy.

    Args:
        answer_list: file with the answers to rank, a JSON list of texts (the authors' `answer_list.json`: 3,128);
            None to write answers.
        image_roots: folder in place of `image_root` by the value of a row's `dataset` (the authors: `vqa` for COCO,
            `vg` for Visual Genome).
        held_out: share of the images whose training rows are left out of training, and validate if `validation` is
            not given. An image is held out or not for any order and number of rows.
        image_column: column of the images.
        question_column: column of the questions.
        answer_column: column of the answers; by default `answers` if a row has it, else `answer`.
        dataset_weights: weight of each answer by the value of a row's `dataset`, in place of its share of the
            answers; by default 0.5 for `vg` (authors).
    """

    default_image_size: ClassVar[int | None] = 384

    def __init__(
        self,
        *,
        answer_list: str | None = None,
        image_roots: dict[str, str] | None = None,
        held_out: Annotated[float, BELOW_ONE] = 0.0,
        image_column: str = "image",
        question_column: str = "question",
        answer_column: str | None = None,
        dataset_weights: Annotated[dict[str, float] | None, POSITIVE] = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.answer_list = answer_list
        self.held_out = held_out
        weights = {"vg": 0.5} if dataset_weights is None else dataset_weights
        columns = image_column, question_column, answer_column
        self.opening = QuestionOpening(self.image_root, image_roots or {}, columns, weights, self.cache_dir)

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        return [self.opening.open(source, split) for source in self._sources(split)[0]]

    def open_split(self, split: Split) -> QuestionTable | None:
        """Open and check the rows of a split."""
        sources = self.open_sources(split)
        if not sources:
            return None
        rows = QuestionTable(sources, self.max_pixels, self._sources(split)[1])
        rows.check(split)
        return rows

    def _sources(self, split: Split) -> tuple[list[Any], tuple[float, float] | None]:
        """Return the sources of a split, and the share of their images that it has, from and up to; None for all."""
        if not self.held_out or split not in ("train", "validation"):
            return self.sources[split], None
        if split == "train":
            return self.sources["train"], (self.held_out, 1.0)
        if self.sources["validation"]:
            return self.sources["validation"], None
        return self.sources["train"], (0.0, self.held_out)

    @cached_property
    def answers(self) -> Sequence[str]:
        """The answers that are ranked, without empty and repeated ones; empty if there is no list.

        Raises:
            UserError: If the file does not exist, or is not a list with texts.
        """
        if self.answer_list is None:
            return ()
        path = Path(self.answer_list).expanduser()
        if not path.is_file():
            raise UserError(f"Expected a JSON list of answers, got no file {self.answer_list!r}: correct the path.")
        content = parse_json(path.read_text(encoding=ENCODING), path)
        texts = usable_answers(content) if isinstance(content, list) else []
        if not texts:
            raise UserError(
                f"Expected a JSON list of answers in {self.answer_list!r}, got a {type(content).__name__} without "
                "any: correct data.answer_list."
            )
        return tuple(dict.fromkeys(texts))
