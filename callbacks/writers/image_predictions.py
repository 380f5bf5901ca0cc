"""What `predict` makes of images, and of texts, in Parquet files: embeddings, captions, classes."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..distributed.collectives import gather_texts
from .rows import PredictionRowsWriter, gather_rows

ORIGIN = b"tower"
"""Entry of the file's metadata that says what made its embeddings, in JSON."""
_NO_IDS = torch.zeros(0, dtype=torch.long)


class ImageEmbeddingWriter(PredictionRowsWriter):
    """Writes `embeddings.parquet` after `predict`: sample_index, image, image_id, embedding (D float32).

    Embeddings are written as they come, not scaled. `image` is the image's path, or its source and row, from the
    datamodule's `picture_name`; null where there is none. What made them, the module's `origin` if it has one (plain
    data), is the entry "tower" of the file's metadata. The file is written beside its place and then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "embedding": [B, D]}`. All
    embeddings are held in main memory, in every process.

    Args:
        folder: Where the file goes, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        ValueError: If `predict_step` returns something else.
    """

    returned, file, written = ("image_id", "embedding"), "embeddings.parquet", "one embedding of each is"

    @override
    def kept(self, outputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return outputs["image_id"].cpu(), outputs["embedding"].float().cpu()

    @override
    def gathered(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ids, embeddings = gather_rows([ids for ids, _ in batches], _NO_IDS), [part for _, part in batches]
        return ids, gather_rows(embeddings, torch.zeros(0, 1))

    @override
    def columns(self, gathered: tuple[Tensor, Tensor], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        ids, embeddings = gathered
        # Of one width, so that no offset can grow too large for its type.
        rows = pa.FixedSizeListArray.from_arrays(embeddings[order].numpy().reshape(-1), embeddings.shape[1])
        return {"image_id": ids[order].numpy(), "embedding": rows}

    @override
    def metadata(self, pl_module: LightningModule) -> dict[bytes, bytes] | None:
        origin = getattr(pl_module, "origin", None)
        return None if origin is None else {ORIGIN: json.dumps(origin).encode()}


class CaptionWriter(PredictionRowsWriter):
    """Writes `captions.parquet` after `predict`: sample_index, image, image_id, caption.

    `image` is the image's path, or its source and row, from the datamodule's `picture_name`, or null.
    The file is written beside its place and then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "caption": list of B texts}`.

    Args:
        folder: Where the file goes, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        ValueError: If `predict_step` returns something else.
    """

    returned, file, written = ("image_id", "caption"), "captions.parquet", "one caption of each is"

    @override
    def kept(self, outputs: dict[str, Any]) -> tuple[Tensor, list[str]]:
        return outputs["image_id"].cpu(), outputs["caption"]

    @override
    def gathered(self, batches: Sequence[tuple[Tensor, list[str]]]) -> tuple[Tensor, list[str]]:
        ids = gather_rows([ids for ids, _ in batches], _NO_IDS)
        return ids, gather_texts([text for _, texts in batches for text in texts])

    @override
    def columns(self, gathered: tuple[Tensor, list[str]], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        ids, captions = gathered
        texts = pa.array([captions[place] for place in order.tolist()], "string")
        return {"image_id": ids[order].numpy(), "caption": texts}


class _Best(NamedTuple):
    """The most probable classes [N, k], and how probable they are."""

    labels: Tensor
    probabilities: Tensor


class _ClassesWriter(PredictionRowsWriter):
    """Writes the most probable classes."""

    returned, written = ("probabilities",), "their classes are"

    def __init__(self, top_k: int = 5, folder: str | None = None, class_names: list[str] | None = None) -> None:
        super().__init__(folder)
        if top_k < 1:
            raise ValueError(f"top_k={top_k} of {type(self).__name__} must be at least 1.")
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


class ClassPredictionWriter(_ClassesWriter):
    """Writes `predictions.parquet` after `predict`, a row for each image in the order of the data.

    Columns: sample_index; image, its path, or its source and row; label, the most probable class; name of that class;
    probability; top_labels and top_probabilities, the `top_k` most probable, best first. Names come from the
    datamodule's `picture_name` and `class_names`; what is not known is null. The file is written beside its place and
    then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: number of classes in the lists.
        folder: where the file goes, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        ValueError: if `top_k` is below 1, or `predict_step` returns something else.
    """

    file = "predictions.parquet"


class TextClassPredictionWriter(_ClassesWriter):
    """Writes `text_predictions.parquet` after `predict`, a row for each text in the order of the data.

    Columns: text_index, the place in the list of texts; text; and label, name, probability, top_labels and
    top_probabilities as of `ClassPredictionWriter`.

    The module's `predict_step` returns `{"text_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: number of classes in the lists.
        folder: where the file goes, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        ValueError: if `top_k` is below 1, or `predict_step` returns something else.
    """

    of_texts, file = True, "text_predictions.parquet"
