"""Embeddings of images in a Parquet file."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from .rows import PredictionRowsWriter

ORIGIN = b"tower"
"""Entry of the file's metadata with the description of what made its embeddings, in JSON."""


class ImageEmbeddingWriter(PredictionRowsWriter):
    """Write `embeddings.parquet` after `predict`: sample_index, image, image_id, embedding (D float32).

    Embeddings are not normalized. `image` is the image's path, or its source and row, from the
    datamodule's `image_name`; null if it has none. The module's `origin` (plain data), if it has one, describes
    what made the embeddings; it is the entry "tower" of the file's metadata. The file is written atomically.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "embedding": [B, D]}`. Every
    process holds all embeddings in main memory.

    Args:
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        UserError: If `predict_step` returns something else.
    """

    returned = ("image_id", "embedding")
    empty = (torch.zeros(0, dtype=torch.long), torch.zeros(0, 1))
    file = "embeddings.parquet"
    content = "embeddings"

    @override
    def kept(self, outputs: dict[str, Any]) -> Sequence[Any]:
        return outputs["image_id"].cpu(), outputs["embedding"].float().cpu()

    @override
    def columns(self, gathered: Sequence[Any], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        ids, embeddings = gathered
        # Of one width, so that no offset can grow too large for its type.
        rows = pa.FixedSizeListArray.from_arrays(embeddings[order].numpy().reshape(-1), embeddings.shape[1])
        return {"image_id": ids[order].numpy(), "embedding": rows}

    @override
    def metadata(self, pl_module: LightningModule) -> dict[bytes, bytes] | None:
        origin = getattr(pl_module, "origin", None)
        return None if origin is None else {ORIGIN: json.dumps(origin).encode()}
