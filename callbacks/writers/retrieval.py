"""Retrieval results of `predict` as Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.files import replacing
from ...common.ranges import COUNT, CheckedArguments
from ...common.tokenizers import decoded_text
from ...metrics.finite import highest, non_finite_last
from .rows import prediction_folder

# Queries in a block: 1024 rows of similarities to a million candidates are 4 GB.
_ROWS = 1024
MODEL_KEY = b"vlightning_model"
"""Entry of a file's metadata with the fingerprints of the model's towers, as JSON."""
_IMAGE = [("sample_index", pa.int64()), ("image", pa.string())]
_TEXT = [("text_index", pa.int64()), ("text", pa.string())]
_EMBEDDING = [("embedding", pa.list_(pa.float32()))]
_RANK = [("rank", pa.int32())]
_SCORES = [("similarity", pa.float32()), ("match_score", pa.float32())]


class RetrievalPredictionWriter(CheckedArguments, Callback):
    """Write embeddings and matches after `predict`, as Parquet files in the run's folder.

    - `image_embeddings.parquet`: sample_index, image, embedding (list of float32);
    - `text_embeddings.parquet`: text_index, text, embedding;
    - `text_to_image.parquet`, the best images of every text: text_index, text, rank, sample_index, image, similarity,
      match_score;
    - `image_to_text.parquet`, the best texts of every image: sample_index, image, rank, text_index, text, similarity,
      match_score.

    `image` is the image's path, or its source and row. `text_index` is the index in the list of texts; captions that
    came with the images get the numbers after the list. `rank` counts from 1 in the final order; `similarity` is the
    cosine of the embeddings, null if one of them is non-finite; `match_score` is null if the matching head was not
    used. All four files are written, some without rows if there were only images or only texts. They are written
    atomically. The files name the model's towers by their fingerprints, if the module has a method `tower_record`.

    The names come from the datamodule's `image_name` and `predict_texts`. Other texts are decoded by its `tokenizer`
    from what the model read. Unknown names are null.

    Memory: the evaluation holds the features and the candidates of all images and texts in main memory, in every
    process. Rank 0 also holds their names, and the rows of 1024 queries at a time; if `top_k` exceeds the number of
    candidates that the evaluation kept, also the similarities of these queries to all candidates.

    Args:
        top_k: Number of matches of each query.
        folder: Folder of the files, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        UserError: If `top_k` is below 1, or the module has no retrieval evaluation.
    """

    def __init__(self, top_k: Annotated[int, COUNT] = 10, folder: str | None = None) -> None:
        super().__init__()
        self.top_k = top_k
        self.folder = folder

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(getattr(pl_module, "evaluation", None), "result"):
            raise UserError(
                "Expected a module with a retrieval evaluation (`evaluation.result`) for RetrievalPredictionWriter, "
                f"got {type(pl_module).__name__}: leave the callback out."
            )

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        evaluation: Any = pl_module.evaluation
        result = evaluation.result
        data = getattr(trainer, "datamodule", None)
        images = _images(result, data)
        texts = _texts(result, data)
        folder = prediction_folder(trainer, self.folder)
        record: Any = getattr(pl_module, "tower_record", dict)()
        metadata = {MODEL_KEY: json.dumps(record)} if record else None
        tables = {
            "image_embeddings": (_IMAGE + _EMBEDDING, images.embeddings()),
            "text_embeddings": (_TEXT + _EMBEDDING, texts.embeddings()),
            "text_to_image": (_TEXT + _RANK + _IMAGE + _SCORES, texts.matches(result.near_images, images, self.top_k)),
            "image_to_text": (_IMAGE + _RANK + _TEXT + _SCORES, images.matches(result.near_texts, texts, self.top_k)),
        }
        with ExitStack() as stack:  # the files get their names once all of them are written
            for name, (columns, blocks) in tables.items():
                _write(stack.enter_context(replacing(folder / f"{name}.parquet")), pa.schema(columns, metadata), blocks)
        rank_zero_info(f"{len(images)} images and {len(texts)} texts: embeddings and matches are in {folder}.")


class _Side:
    """The images, or the texts.

    Args:
        columns: Columns of number and name.
        features: Features, float32 [N, E].
        numbers: Numbers, long [N].
        names: Names beside the numbers.
        order: Indices into the above in the order of writing, long [N].
    """

    def __init__(
        self,
        columns: list[tuple[str, pa.DataType]],
        features: Tensor,
        numbers: Tensor,
        names: list[str | None],
        order: Tensor,
    ) -> None:
        (self.number, _), (self.name, _) = columns
        self.features = features
        self.numbers = numbers
        self.names = pa.array(names, pa.string())
        self.order = order

    def __len__(self) -> int:
        return len(self.features)

    def identity(self, rows: Tensor) -> dict[str, Any]:
        """Return the columns of number and name of some rows."""
        return {self.number: self.numbers[rows].numpy(), self.name: self.names.take(pa.array(rows.numpy()))}

    def embeddings(self) -> Iterator[dict[str, Any]]:
        """Return the rows of the table of embeddings, in blocks."""
        for rows in self.order.split(_ROWS):
            features = self.features[rows].numpy()
            starts = np.arange(len(rows) + 1, dtype=np.int32) * features.shape[1]
            yield self.identity(rows) | {"embedding": pa.ListArray.from_arrays(starts, features.reshape(-1))}

    def matches(self, near: Any, others: _Side, top_k: int) -> Iterator[dict[str, Any]]:
        """Return the rows of the table of matches, in blocks of queries.

        Args:
            near: Candidates of every row, best first, as the evaluation kept them.
            others: The side of the candidates.
            top_k: Number of matches of a query.
        """
        count = min(top_k, len(others))
        for rows in self.order.split(_ROWS):
            index = near.index[rows, :count]
            similarity = near.similarity[rows, :count]
            score = torch.full_like(similarity, torch.nan)
            if near.match_score is not None:
                score = near.match_score[rows, :count]
            if index.shape[1] < count:
                # The evaluation kept fewer; the nearest of the other candidates come after these.
                rest = non_finite_last(self.features[rows] @ others.features.T)
                # No candidate twice: non-finite ones rank before those that are listed already.
                rest = rest.clamp(min=torch.finfo(rest.dtype).min).scatter(1, index, -torch.inf)
                further = highest(rest, count - index.shape[1])
                index = torch.cat([index, further.indices], 1)
                similarity = torch.cat([similarity, further.values], 1)
                score = torch.nn.functional.pad(score, (0, further.values.shape[1]), value=torch.nan)
            finite = similarity > torch.finfo(similarity.dtype).min
            yield {
                **self.identity(rows.repeat_interleave(count)),
                "rank": np.tile(np.arange(1, count + 1, dtype=np.int32), len(rows)),
                **others.identity(index.flatten()),
                # NaN becomes null.
                "similarity": pa.array(similarity.where(finite, torch.nan).flatten().numpy(), from_pandas=True),
                "match_score": pa.array(score.flatten().numpy(), from_pandas=True),
            }


def _images(result: Any, data: Any) -> _Side:
    numbers = result.sample_index
    named = hasattr(data, "image_name")
    names = [data.image_name("predict", number) if named else None for number in numbers.tolist()]
    return _Side(_IMAGE, result.image_features, numbers, names, numbers.argsort(stable=True))


def _texts(result: Any, data: Any) -> _Side:
    predict_texts: list[str] | None = getattr(data, "predict_texts", None)
    tokenizer = getattr(data, "tokenizer", None)
    listed = result.text_index >= 0
    total = len(predict_texts) if predict_texts is not None else max([-1, *result.text_index.tolist()]) + 1
    numbers = result.text_index.clone()
    numbers[~listed] = torch.arange(total, total + int((~listed).sum()))
    names: list[str | None] = []
    for number, ids, mask in zip(numbers.tolist(), result.input_ids, result.attention_mask, strict=True):
        if predict_texts is not None and number < total:
            names.append(predict_texts[number])
        else:
            names.append(None if tokenizer is None else decoded_text(tokenizer, ids[mask.bool()]))
    return _Side(_TEXT, result.text_features, numbers, names, numbers.argsort())


def _write(file: Path, schema: pa.Schema, blocks: Iterator[dict[str, Any]]) -> None:
    with pq.ParquetWriter(file, schema) as writer:
        for block in blocks:
            writer.write_table(pa.table(block, schema=schema))
