"""Boxes that texts refer to in a Parquet file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from .rows import PredictionRowsWriter

_NUMBERS = ("itm_box", "itm_score", "itc_box", "itc_score")


class GroundingWriter(PredictionRowsWriter):
    """Write `boxes.parquet` after `predict`, a row for each text in the order of the data.

    Columns: sample_index; image, its path, or its source and row; ref_id, the number in RefCOCO's annotations; text;
    itm_box, the chosen box under the map of the matching head, [x, y, width, height] in pixels; itm_score; itc_box and
    itc_score, of the contrastive similarity's map. Where no box has a positive score, box and score are null. Texts
    come from the datamodule's `captions`; unknown values are null. The file is written atomically.

    The module's `predict_step` returns `{"sample_index": long [B], "ref_id": long [B], "itm_box": [B, 4], "itm_score":
    [B], "itc_box": [B, 4], "itc_score": [B]}`, NaN where no box is chosen.

    Args:
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        UserError: If `predict_step` returns something else.
    """

    returned = ("ref_id", *_NUMBERS)
    empty = (torch.zeros(0, dtype=torch.long), torch.zeros(0, 1, dtype=torch.float64))
    file = "boxes.parquet"
    content = "the boxes of their texts"

    @override
    def kept(self, outputs: dict[str, Any]) -> Sequence[Any]:
        columns = [outputs[name].double().cpu() for name in _NUMBERS]
        numbers = torch.cat([column if column.ndim == 2 else column[:, None] for column in columns], 1)
        return outputs["sample_index"].cpu(), torch.cat([outputs["ref_id"].double().cpu()[:, None], numbers], 1)

    @override
    def columns(self, gathered: Sequence[Any], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        index = gathered[0][order]
        numbers = gathered[1][order].numpy().reshape(len(order), -1)
        data: Any = getattr(trainer, "datamodule", None)
        texts: list[str | None] = [None] * len(order)
        if hasattr(data, "captions"):
            texts = [" ".join(captions) for captions in data.captions("predict", index.tolist())]
        ref_ids = [int(ref_id) if ref_id >= 0 else None for ref_id in numbers[:, 0]]
        columns = {"ref_id": pa.array(ref_ids, "int64"), "text": pa.array(texts, "string")}
        for name, first in (("itm", 1), ("itc", 6)):
            boxes = [None if np.isnan(row).any() else row.tolist() for row in numbers[:, first : first + 4]]
            columns[f"{name}_box"] = pa.array(boxes, pa.list_(pa.float64()))
            columns[f"{name}_score"] = pa.array(numbers[:, first + 4], from_pandas=True)
        return columns
