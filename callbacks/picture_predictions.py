"""What `predict` makes of each picture, a row for each in one Parquet file: its embedding, or its caption."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from .distributed import gather_texts, gather_uneven
from .tables import prediction_folder, write_table

ORIGIN = b"tower"
"""Entry of the file's metadata that says what made its embeddings, in JSON."""


class _PictureRowsWriter(Callback):
    """Writes a column beside the columns sample_index, image_id and image, in the order of the data.

    A subclass says what `predict_step` returns beside `sample_index` and `image_id`, long [B], and how that is gathered
    and written.

    Args:
        folder: Where the file goes, by default `predictions` in the Trainer's `default_root_dir`.
    """

    returned: str
    file: str

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._index: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._values: list[Any] = []

    @abstractmethod
    def gathered(self, batches: Sequence[Any]) -> Any:
        """What all processes returned, in the order of their ranks; every process calls it."""

    @abstractmethod
    def column(self, values: Any, order: Tensor) -> Any:
        """A column of pyarrow: the values at the places `order`."""

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._index, self._ids, self._values = [], [], []

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, dict) or not {"sample_index", "image_id", self.returned} <= outputs.keys():
            raise ValueError(
                f"predict_step of {type(pl_module).__name__} returned no sample_index, image_id and {self.returned}, "
                f"which {type(self).__name__} writes: leave the callback out, or return them."
            )
        self._index.append(outputs["sample_index"].cpu())
        self._ids.append(outputs["image_id"].cpu())
        self._values.append(outputs[self.returned])

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        none = torch.zeros(0, dtype=torch.long)
        index, ids = (gather_uneven(torch.cat([none, *part])) for part in (self._index, self._ids))
        values = self.gathered(self._values)
        self._index, self._ids, self._values = [], [], []
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        order = index.argsort()
        data: Any = getattr(trainer, "datamodule", None)
        named = hasattr(data, "picture_name")
        names = [data.picture_name("predict", number) if named else None for number in index[order].tolist()]
        table = pa.table(
            {
                "sample_index": index[order].numpy(),
                "image_id": ids[order].numpy(),
                "image": pa.array(names, "string"),
                self.returned: self.column(values, order),
            }
        )
        origin = getattr(pl_module, "origin", None)
        if origin is not None:
            table = table.replace_schema_metadata({ORIGIN: json.dumps(origin).encode()})
        file = prediction_folder(trainer, self.folder) / self.file
        write_table(table, file)
        rank_zero_info(f"{len(index)} pictures: one {self.returned} of each is in {file}.")


class ImageEmbeddingWriter(_PictureRowsWriter):
    """Writes `embeddings.parquet` after `predict`: sample_index, image_id, image, embedding (D float32).

    Embeddings are written as they come, not scaled. `image` is the picture's path, or its source and row, from the
    datamodule's `picture_name`; null where there is none. What made them, the module's `origin` if it has one (plain
    data), is the entry "tower" of the file's metadata. The file is written beside its place and then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "embedding": [B, D]}`. All
    embeddings are held in main memory, in every process.

    Args:
        folder: Where the file goes, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        ValueError: If `predict_step` returns something else.
    """

    returned, file = "embedding", "embeddings.parquet"

    @override
    def gathered(self, batches: Sequence[Tensor]) -> Tensor:
        # A process may have got no batch at all, and then knows the width from the others.
        width = int(gather_uneven(torch.tensor([batches[0].shape[1] if batches else 0])).max())
        return gather_uneven(torch.cat([torch.zeros(0, width), *(batch.float().cpu() for batch in batches)]))

    @override
    def column(self, values: Tensor, order: Tensor) -> Any:
        # Of one width, so that no offset can grow too large for its type.
        return pa.FixedSizeListArray.from_arrays(values[order].numpy().reshape(-1), max(values.shape[1], 1))


class CaptionWriter(_PictureRowsWriter):
    """Writes `captions.parquet` after `predict`: sample_index, image_id, image, caption.

    `image` is the picture's path, or its source and row, from the datamodule's `picture_name`, or null.
    The file is written beside its place and then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "caption": list of B texts}`.

    Args:
        folder: Where the file goes, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        ValueError: If `predict_step` returns something else.
    """

    returned, file = "caption", "captions.parquet"

    @override
    def gathered(self, batches: Sequence[list[str]]) -> list[str]:
        return gather_texts([text for batch in batches for text in batch])

    @override
    def column(self, values: list[str], order: Tensor) -> Any:
        return pa.array([values[place] for place in order.tolist()], "string")
