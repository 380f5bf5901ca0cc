"""Figures of classified samples of one or several images with a text."""

from __future__ import annotations

from typing import Annotated, Any

from lightning.pytorch import Trainer
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT
from ...metrics.finite import NOTHING, best
from .evaluation import EvaluationFigures, NoFigureError, Split, evenly_spread
from .grid import Panel, Row


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
        for place in order[evenly_spread(len(order), self.samples)].tolist():
            index, label = int(result.sample_index[place]), int(result.label[place])
            probabilities = result.probabilities[place]
            predicted = int(best(probabilities))
            try:
                images, text = data.images(split, index), data.text(split, index)
            except (UserError, ValueError, AttributeError) as error:  # deleted since, or a datamodule of other data
                raise NoFigureError(f"a sample could not be opened: {error}") from error
            names = getattr(data, "class_names", None)
            said = "no finite probability"
            if predicted != NOTHING:
                said = f"{names[predicted] if names else predicted}  {probabilities[predicted]:.0%}"
            panels = [Panel(image, said, predicted == label) for image in images]
            rows.append(Row(text, f"label: {names[label] if names else label}", panels))
        return rows
