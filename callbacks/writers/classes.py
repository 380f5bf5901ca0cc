"""The most probable classes of images, or of texts, as columns of a Parquet file."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from .rows import PredictionRowsWriter, gather_rows


class _Best(NamedTuple):
    """The most probable classes [N, k] and their probabilities."""

    labels: Tensor
    probabilities: Tensor


class ClassesWriter(PredictionRowsWriter):
    """Write the most probable classes."""

    returned, written = ("probabilities",), "their classes are"

    def __init__(self, top_k: int = 5, folder: str | None = None, class_names: list[str] | None = None) -> None:
        super().__init__(folder)
        if top_k < 1:
            raise UserError(f"Expected top_k of {type(self).__name__} of at least 1, got {top_k}: correct it.")
        self.top_k = top_k
        self.class_names = class_names

    @override
    def kept(self, outputs: dict[str, Any]) -> _Best:
        probabilities = outputs["probabilities"].float()
        best = probabilities.topk(min(self.top_k, probabilities.shape[1]))
        return _Best(best.indices.cpu(), best.values.cpu())

    @override
    def gathered(self, batches: Sequence[_Best]) -> _Best:
        labels = gather_rows([best.labels for best in batches], torch.zeros(0, 1, dtype=torch.long))
        return _Best(labels, gather_rows([best.probabilities for best in batches], torch.zeros(0, 1)))

    @override
    def columns(self, gathered: _Best, order: Tensor, trainer: Trainer) -> dict[str, Any]:
        labels, probabilities = gathered.labels[order], gathered.probabilities[order]
        names = self.class_names or getattr(getattr(trainer, "datamodule", None), "class_names", None)
        first = labels[:, 0].tolist()
        starts = np.arange(len(labels) + 1, dtype=np.int32) * labels.shape[1]
        return {
            "label": labels[:, 0].numpy(),
            "name": pa.array([names[label] if names else None for label in first], "string"),
            "probability": probabilities[:, 0].numpy(),
            "top_labels": pa.ListArray.from_arrays(starts, labels.numpy().reshape(-1)),
            "top_probabilities": pa.ListArray.from_arrays(starts, probabilities.numpy().reshape(-1)),
        }
