"""Most probable classes of images, or of texts, in a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ...common.ranges import COUNT, CheckedArguments
from ...metrics.finite import highest
from .rows import PredictionRowsWriter


class ClassesWriter(CheckedArguments, PredictionRowsWriter):
    """Write the most probable classes; null where no probability is finite."""

    returned = ("probabilities",)
    empty = (torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1))  # classes [N, k], and their probabilities
    content = "the most probable classes"

    def __init__(
        self, top_k: Annotated[int, COUNT] = 5, folder: str | None = None, class_names: list[str] | None = None
    ) -> None:
        super().__init__(folder)
        self.top_k = top_k
        self.class_names = class_names

    @override
    def kept(self, outputs: dict[str, Any]) -> Sequence[Any]:
        best = highest(outputs["probabilities"].float(), self.top_k)
        return best.indices.cpu(), best.values.cpu()

    @override
    def columns(self, gathered: Sequence[Any], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        top_labels, top_probabilities = (values[order] for values in gathered)
        names = self.class_names or getattr(getattr(trainer, "datamodule", None), "class_names", None)
        finite = top_probabilities.isfinite()
        labels = pa.array(top_labels.flatten().numpy(), mask=~finite.flatten().numpy())
        probabilities = pa.array(top_probabilities.flatten().numpy(), mask=~finite.flatten().numpy())
        starts = np.arange(len(finite) + 1, dtype=np.int32) * finite.shape[1]
        best = labels.take(pa.array(starts[:-1]))
        return {
            "label": best,
            "name": pa.array(
                [names[label] if names and label is not None else None for label in best.to_pylist()], "string"
            ),
            "probability": probabilities.take(pa.array(starts[:-1])),
            "top_labels": pa.ListArray.from_arrays(starts, labels),
            "top_probabilities": pa.ListArray.from_arrays(starts, probabilities),
        }


class ClassPredictionWriter(ClassesWriter):
    """Write `predictions.parquet` after `predict`, a row for each image in the order of the data.

    Columns: sample_index; image, its path, or its source and row (of a task with texts also text; of pairs image_left,
    image_right and text); label, the most probable class; name of that class;
    probability; top_labels and top_probabilities, the `top_k` most probable, best first. Names come from the
    datamodule's `image_name` and `class_names`; unknown values are null. The file is
    written atomically.

    The module's `predict_step` returns `{"sample_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: Number of classes in the lists.
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: Names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        UserError: If `top_k` is below 1, or `predict_step` returns something else.
    """

    file = "predictions.parquet"


class TextClassPredictionWriter(ClassesWriter):
    """Write `text_predictions.parquet` after `predict`, a row for each text in the order of the data.

    Columns: text_index, the index in the list of texts; text; and label, name, probability, top_labels and
    top_probabilities as of `ClassPredictionWriter`.

    The module's `predict_step` returns `{"text_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: Number of classes in the lists.
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: Names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        UserError: If `top_k` is below 1, or `predict_step` returns something else.
    """

    of_texts = True
    file = "text_predictions.parquet"
