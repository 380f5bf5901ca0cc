"""Figures of single samples: their predicted classes, answers, or boxes."""

from __future__ import annotations

from typing import Annotated, Any

from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT
from ...metrics.finite import NOTHING, best
from .evaluation import EvaluationFigures, NoFigureError, Split, evenly_spread, heat_maps, open_image
from .grid import CHOSEN, RIGHT, Panel, Row


class PredictionFigures(EvaluationFigures):
    """Draw samples with their images, text, label and predicted class, such as the pairs of images of NLVR2.

    Images of correctly classified samples have a green frame. The samples stay the same, so the figures
    "val/predictions" and "test/predictions" show how a run improves. The datamodule has
    `images(split, sample_index)` and `text(split, sample_index)`.

    Args:
        samples: Number of samples, spread evenly over the evaluation set.
        every_n_epochs: Epochs of training between two figures of the validation.
    """

    name = "predictions"
    evaluates = "classification"
    result_needs = "probabilities"

    def __init__(self, samples: Annotated[int, COUNT] = 8, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.samples = samples

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        if not trainer.is_global_zero:
            return []
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        order = result.sample_index.argsort()
        rows = []
        for sample in order[evenly_spread(len(order), self.samples)].tolist():
            index = int(result.sample_index[sample])
            label = int(result.label[sample])
            probabilities = result.probabilities[sample]
            predicted = int(best(probabilities))
            try:
                images = data.images(split, index)
                text = data.text(split, index)
            except (UserError, ValueError, AttributeError) as error:  # deleted since, or a datamodule of other data
                raise NoFigureError(f"a sample could not be opened: {error}") from error
            names = getattr(data, "class_names", None)
            title = "no finite probability"
            if predicted != NOTHING:
                title = f"{names[predicted] if names else predicted}  {probabilities[predicted]:.0%}"
            panels = [Panel(image, title, predicted == label) for image in images]
            rows.append(Row(text, f"label: {names[label] if names else label}", panels))
        return rows


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
    evaluates = "question"
    result_needs = "answers"

    def __init__(
        self, questions: Annotated[int, COUNT] = 8, top: Annotated[int, COUNT] = 3, every_n_epochs: int = 1
    ) -> None:
        super().__init__(every_n_epochs)
        self.questions = questions
        self.top = top

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        order = result.sample_index.argsort()
        chosen_rows = [int(order[number]) for number in evenly_spread(len(order), self.questions)]
        if not chosen_rows:
            return []
        indices = [int(result.sample_index[number]) for number in chosen_rows]
        shown = [open_image(data, split, result.sample_index[number]) for number in chosen_rows]
        texts = [data.question(split, index) for index in indices]
        encoded = data.encoded_questions(texts)
        best = data.encode_answers([result.answers[number][0] for number in chosen_rows])
        tokens = (encoded["input_ids"], encoded["attention_mask"], best["answer_ids"])
        maps: Tensor = heat_maps(trainer, pl_module, "answer_maps", shown, *tokens)
        rows = []
        for number, index, text, image, heat in zip(
            chosen_rows, indices, texts, shown, maps.float().cpu(), strict=True
        ):
            top = list(zip(result.answers[number], result.probabilities[number].tolist(), strict=True))[: self.top]
            note = "; ".join(f"{answer} {probability:.0%}" for answer, probability in top)
            human_answers = ", ".join(dict.fromkeys(data.given_answers(split, index)))
            question = f"{text} (given: {human_answers})" if human_answers else text
            right = float(result.accuracy[number]) > 0
            rows.append(
                Row(question, note, [Panel(image, top[0][0], right), Panel(image, "where it looked", heat=heat)])
            )
        return rows


class GroundingFigures(EvaluationFigures):
    """Draw texts with their image, and both maps with the right box in green and the chosen box in white.

    "itm" is the map of the matching head, "itc" that of the contrastive similarity; the frame of a map is green if the
    chosen box is correct. The figures are "val/grounding" and "test/grounding". The module has a method
    `grounding_maps(image, input_ids, attention_mask)` that returns maps [B, g, g] by name, and its evaluation a
    `GroundingResult`.

    Args:
        texts: Number of texts, spread evenly over the evaluation set, the same every time.
        every_n_epochs: Epochs of training between two figures of the validation.
    """

    name = "grounding"
    module_needs = "grounding_maps"
    evaluates = "grounding"
    result_needs = "chosen"

    def __init__(self, texts: Annotated[int, COUNT] = 6, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.texts = texts

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        chosen_rows = evenly_spread(len(result.sample_index), self.texts)
        index = result.sample_index[chosen_rows]
        texts = [" ".join(captions) for captions in data.captions(split, index.tolist())]
        shown = [open_image(data, split, one) for one in index]
        encoded = data.encoder()(texts)
        maps = heat_maps(trainer, pl_module, "grounding_maps", shown, encoded["input_ids"], encoded["attention_mask"])
        rows = []
        for row, (number, text, image) in enumerate(zip(chosen_rows, texts, shown, strict=True)):
            right = (result.right[number], RIGHT)
            panels = [Panel(image, boxes=[right])]
            for name, heat in maps.items():
                chosen = result.chosen[name][number]
                overlap = float(result.iou[name][number])
                boxes = [right] if chosen.isnan().any() else [right, (chosen, CHOSEN)]
                title = f"{name}  no box" if chosen.isnan().any() else f"{name}  IoU {overlap:.2f}"
                panels.append(Panel(image, title, overlap >= 0.5, heat[row], boxes))
            rows.append(Row(text, panels=panels))
        return rows
