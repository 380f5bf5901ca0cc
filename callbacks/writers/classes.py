"""The most probable classes of images, or of texts, as columns of a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ...common.ranges import COUNT, CheckedArguments
from ...metrics.finite import highest
from .rows import PredictionRowsWriter, gather_rows


class _Best(NamedTuple):
    """The most probable classes [N, k] and their probabilities."""

    labels: Tensor
    probabilities: Tensor


class ClassesWriter(CheckedArguments, PredictionRowsWriter):
    """Write the most probable classes; null where no probability is finite."""

    returned, written = ("probabilities",), "their classes are"

    def __init__(
        self, top_k: Annotated[int, COUNT] = 5, folder: str | None = None, class_names: list[str] | None = None
    ) -> None:
        super().__init__(folder)
        self.top_k = top_k
        self.class_names = class_names

    @override
    def kept(self, outputs: dict[str, Any]) -> _Best:
        probabilities = outputs["probabilities"].float()
        best = highest(probabilities, self.top_k)
        return _Best(best.indices.cpu(), best.values.cpu())

    @override
    def gathered(self, batches: Sequence[_Best]) -> _Best:
        labels = gather_rows([best.labels for best in batches], torch.zeros(0, 1, dtype=torch.long))
        return _Best(labels, gather_rows([best.probabilities for best in batches], torch.zeros(0, 1)))

    @override
    def columns(self, gathered: _Best, order: Tensor, trainer: Trainer) -> dict[str, Any]:
        names = self.class_names or getattr(getattr(trainer, "datamodule", None), "class_names", None)
        finite = gathered.probabilities[order].isfinite()
        labels = pa.array(gathered.labels[order].flatten().numpy(), mask=~finite.flatten().numpy())
        probabilities = pa.array(gathered.probabilities[order].flatten().numpy(), mask=~finite.flatten().numpy())
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
