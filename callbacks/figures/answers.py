"""Figures of answers to questions about images."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ...common.ranges import COUNT
from .evaluation import EvaluationFigures, Split, evenly_spread, open_image
from .grid import Panel, Row


class AnswerFigures(EvaluationFigures):
    """Draw questions with their image, the best answers with their probabilities, and where the best answer looked.

    Beside the question are the answers that people gave. The image has a green frame if the best answer is one of them,
    normalized as for the accuracy. The heat is the Grad-CAM map of the best answer, the module's `answer_maps`, scaled
    to its own maximum. The questions stay the same, so the figures "val/answers" and "test/answers" show
    how a run improves.

    Args:
        questions: Number of questions, spread evenly over the evaluation set.
        top: Number of answers of each question.
        every_n_epochs: Epochs of training between two figures of the validation.
    """

    name = "answers"
    module_needs = "answer_maps"
    evaluates, result_needs = "question", "answers"

    def __init__(
        self, questions: Annotated[int, COUNT] = 8, top: Annotated[int, COUNT] = 3, every_n_epochs: int = 1
    ) -> None:
        super().__init__(every_n_epochs)
        self.questions = questions
        self.top = top

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        # Every process computes the maps, since processes that share a model's weights communicate.
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        order = result.sample_index.argsort()
        places = [int(order[place]) for place in evenly_spread(len(order), self.questions)]
        if not places:
            return []
        indices = [int(result.sample_index[place]) for place in places]
        shown = [open_image(data, split, result.sample_index[place]) for place in places]
        texts = [data.question(split, index) for index in indices]
        encoded = data.encoded_questions(texts)
        best = data.encode_answers([result.answers[place][0] for place in places])
        images = torch.stack([data.eval_transform(image) for image in shown])
        plugin, device = trainer.precision_plugin, pl_module.device
        with plugin.forward_context():
            maps: Tensor = pl_module.answer_maps(
                plugin.convert_input(images.to(device)),
                encoded["input_ids"].to(device),
                encoded["attention_mask"].to(device),
                best["answer_ids"].to(device),
            )
        rows = []
        for place, index, text, image, heat in zip(places, indices, texts, shown, maps.float().cpu(), strict=True):
            top = list(zip(result.answers[place], result.probabilities[place].tolist(), strict=True))[: self.top]
            note = "; ".join(f"{answer} {probability:.0%}" for answer, probability in top)
            given = ", ".join(dict.fromkeys(data.given_answers(split, index)))
            asked = f"{text} (given: {given})" if given else text
            right = float(result.accuracy[place]) > 0
            rows.append(Row(asked, note, [Panel(image, top[0][0], right), Panel(image, "where it looked", heat=heat)]))
        return rows
