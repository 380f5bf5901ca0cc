"""Evaluation of generated texts: answers to questions about images, and captions."""

from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ...callbacks.distributed.collectives import gather_texts, gather_uneven
from ...common.log import log_global
from ...metrics.captions import caption_scores
from ...metrics.vqa import ANSWER_TYPES, answer_accuracy, answer_type
from .protocol import PREFIXES, Batch, Stage, Summary


class AnsweringMethod(Protocol):
    """Methods that `AnswerEvaluation` calls on a module."""

    def answer_questions(self, batch: Batch) -> dict[str, Any]:
        """Return `top_answers`, lists of texts, `top_probabilities` [Q, n] and `answer_ids` [Q, L]."""


class Answered(NamedTuple):
    """The answered questions of all processes, those of rank 0 first."""

    sample_index: Tensor  # long [Q]
    accuracy: Tensor  # float32 [Q], -1 without given answers
    probabilities: Tensor  # float32 [Q, n]
    answers: list[list[str]]  # Q x n, best first


class AnswerEvaluation:
    """Accuracy of VQA, overall and by the type of the question, in percent, over the questions of all processes.

    An evaluation batch holds the `answers` that people gave, `question_id` and `sample_index`. Questions without given
    answers, as those of a challenge's test split, are answered and do not count.
    """

    def __init__(self) -> None:
        self.summary: Summary | None = None
        self.start()

    def start(self) -> None:
        """Clear the answers."""
        self.result: Answered | None = None
        self._rows: list[Tensor] = []  # float64 [Q, 3]: sample_index, accuracy, type
        self._probabilities: list[Tensor] = []
        self._answers: list[list[str]] = []

    def step(self, module: AnsweringMethod, batch: Batch, stage: Stage) -> None:
        """Answer a batch, and compare with the given answers."""
        answers = module.answer_questions(batch)
        rows = torch.full((len(batch["answers"]), 3), -1.0, dtype=torch.float64)
        for row, (index, top, references) in enumerate(
            zip(batch["sample_index"].tolist(), answers["top_answers"], batch["answers"], strict=True)
        ):
            rows[row, 0] = index
            if references:
                rows[row, 1] = answer_accuracy(top[0], references)
                rows[row, 2] = ANSWER_TYPES.index(answer_type(references))
        self._rows.append(rows)
        self._probabilities.append(answers["top_probabilities"].float().cpu())
        self._answers += answers["top_answers"]

    def predict(self, module: AnsweringMethod, batch: Batch) -> dict[str, Any]:
        """Return answers and probabilities, with the positions [Q] of the questions in their data set."""
        names = ("sample_index", "question", "question_id")
        answers = module.answer_questions(batch)
        return {name: batch[name] for name in names} | {
            "answers": answers["top_answers"],
            "probabilities": answers["top_probabilities"],
        }

    def finish(self, module: Any, stage: Stage) -> None:
        """Log the accuracy."""
        if stage == "predict":
            return
        rows = gather_uneven(torch.cat([torch.zeros(0, 3, dtype=torch.float64), *self._rows]))
        width = int(gather_uneven(torch.tensor([batch.shape[1] for batch in self._probabilities[:1]] or [0])).max())
        probabilities = gather_uneven(torch.cat([torch.zeros(0, width), *self._probabilities]))
        texts = iter(gather_texts([text for top in self._answers for text in top]))
        answers = [[next(texts) for _ in range(width)] for _ in range(len(rows))]
        self.start()
        self.result = Answered(rows[:, 0].long(), rows[:, 1].float(), probabilities, answers)
        self.summary = Summary({"questions": len(rows)})
        counted = rows[rows[:, 1] >= 0]
        prefix = PREFIXES[stage]
        if not len(counted):
            rank_zero_warn(
                f"Found no given answers for {len(rows)} questions of the {prefix} split: no accuracy is logged; "
                "`vlightning predict` writes the answers for the challenge's server."
            )
            return
        named = {f"{prefix}/accuracy": 100 * float(counted[:, 1].mean())}
        for number, kind in enumerate(ANSWER_TYPES):
            accuracies = counted[counted[:, 2] == number, 1]
            if len(accuracies):
                named[f"{prefix}/accuracy_{kind.replace('/', '_')}"] = 100 * float(accuracies.mean())
        log_global(module, named, progress_bar=f"{prefix}/accuracy")


class CaptioningMethod(Protocol):
    """Methods that `CaptionEvaluation` calls on a module."""

    def write_captions(self, batch: Batch) -> list[str]:
        """Return a caption of each image of a batch."""


class CaptionEvaluation:
    """BLEU, ROUGE-L and CIDEr-D, times 100, over the images of all processes.

    An evaluation batch holds the `references` of each image, a prediction batch `sample_index` and `image_id`.
    """

    def __init__(self) -> None:
        self.summary: Summary | None = None
        self.start()

    def start(self) -> None:
        """Clear the captions."""
        self._written: list[str] = []
        self._references: list[list[str]] = []

    def step(self, module: CaptioningMethod, batch: Batch, stage: Stage) -> None:
        """Write captions for comparison with the references."""
        self._written += module.write_captions(batch)
        self._references += batch["references"]

    def predict(self, module: CaptioningMethod, batch: Batch) -> Batch:
        """Return captions, with the positions [B] of the images in their data set and their ids."""
        return {name: batch[name] for name in ("sample_index", "image_id")} | {"caption": module.write_captions(batch)}

    def finish(self, module: Any, stage: Stage) -> None:
        """Log the scores."""
        if stage == "predict":
            return
        counts = gather_uneven(torch.tensor([len(texts) for texts in self._references], dtype=torch.long))
        references = iter(gather_texts([text for texts in self._references for text in texts]))
        grouped = [[next(references) for _ in range(count)] for count in counts.tolist()]
        self.summary = Summary({"images": len(grouped)})
        scores = caption_scores(gather_texts(self._written), grouped)
        self.start()
        prefix = PREFIXES[stage]
        named = {f"{prefix}/{name}": value for name, value in scores.items()}
        log_global(module, named, progress_bar=f"{prefix}/cider_d")
