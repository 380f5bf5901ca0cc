"""A base for callbacks that write what `predict` returns, from all processes, into one Parquet file."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.files import replacing
from ..distributed.collectives import gather_texts, gather_uneven


def prediction_folder(trainer: Trainer, folder: str | None) -> Path:
    """Return the given folder, by default `predictions` in the Trainer's `default_root_dir`."""
    return Path(folder or Path(trainer.default_root_dir) / "predictions")


def write_table(table: Any, file: Path) -> None:
    """Write a table atomically, and make its folder."""
    with replacing(file) as staged:
        pq.write_table(table, staged)


class PredictionRowsWriter(Callback):
    """Write a row for each image, or for each text, after `predict`, in the order of the data.

    Columns of images: sample_index; image, its path, or its source and row, from the datamodule's `image_name`; of a
    datamodule with `described`, such as those of pairs of images, the columns that it returns instead. Of texts:
    text_index, the index in the list of texts; text, from the datamodule's `predict_texts`. Unknown values are null.
    The columns of the subclass follow. The file is written atomically. Every process holds all rows in main memory.

    A subclass defines what `predict_step` returns beside `sample_index` or `text_index`, long [B], and how these values
    are written. Batches of the other kind are skipped.

    Args:
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.
    """

    of_texts = False
    returned: tuple[str, ...]
    empty: tuple[Tensor | None, ...]
    """What `kept` returns, without rows: [0], or [0, 1] for rows of any width; None for texts."""
    file: str
    content: str
    """Name of what the file holds, for the log line."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._index: list[Tensor] = []
        self._kept: list[Sequence[Any]] = []

    @abstractmethod
    def kept(self, outputs: dict[str, Any]) -> Sequence[Any]:
        """Return the values of a batch to keep in main memory, tensors and lists of texts in the order of `empty`."""

    @abstractmethod
    def columns(self, gathered: Sequence[Any], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        """Return columns of pyarrow or numpy by name: the gathered values at the indices `order`.

        Args:
            gathered: Values of all processes, by rank, in the order of `empty`.
            order: Indices of the rows, long [N].
            trainer: The Trainer.
        """

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._index = []
        self._kept = []

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
        index_name, other_name = ("text_index", "sample_index") if self.of_texts else ("sample_index", "text_index")
        if isinstance(outputs, dict) and other_name in outputs and index_name not in outputs:
            return
        needed = (index_name, *self.returned)
        if not isinstance(outputs, dict) or not outputs.keys() >= set(needed):
            raise UserError(
                f"Expected {', '.join(needed[:-1])} and {needed[-1]} from predict_step of {type(pl_module).__name__}, "
                f"which {type(self).__name__} writes, got an output without: return them, or leave the callback out."
            )
        self._index.append(outputs[index_name].cpu())
        self._kept.append(self.kept(outputs))

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        index = gather_rows(self._index, torch.zeros(0, dtype=torch.long))
        gathered = [self._gathered(position, none) for position, none in enumerate(self.empty)]
        self._index = []
        self._kept = []
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        order = index.argsort()
        number = "text_index" if self.of_texts else "sample_index"
        names = self._names(trainer, index[order].tolist())
        table = pa.table({number: index[order].numpy(), **names, **self.columns(gathered, order, trainer)})
        file = prediction_folder(trainer, self.folder) / self.file
        write_table(table.replace_schema_metadata(self.metadata(pl_module)), file)
        rank_zero_info(f"{len(index)} {'texts' if self.of_texts else 'images'}: wrote {self.content} to {file}.")

    def _gathered(self, position: int, none: Tensor | None) -> Tensor | list[str]:
        batches = [values[position] for values in self._kept]
        if none is not None:
            return gather_rows(batches, none)
        return gather_texts([text for texts in batches for text in texts])

    def _names(self, trainer: Trainer, numbers: list[int]) -> dict[str, pa.Array]:
        data: Any = getattr(trainer, "datamodule", None)
        columns: dict[str, list[str | None]]
        if self.of_texts:
            texts = getattr(data, "predict_texts", None)
            columns = {"text": [None if texts is None else texts[number] for number in numbers]}
        elif hasattr(data, "described") and numbers:
            rows = [data.described("predict", number) for number in numbers]
            columns = {name: [row[name] for row in rows] for name in rows[0]}
        else:
            named = hasattr(data, "image_name")
            columns = {"image": [data.image_name("predict", number) if named else None for number in numbers]}
        return {name: pa.array(values, "string") for name, values in columns.items()}

    def metadata(self, pl_module: LightningModule) -> dict[bytes, bytes] | None:
        """Return the metadata of the file."""
        return None


def gather_rows(batches: Sequence[Tensor], none: Tensor) -> Tensor:
    """Return the rows of all processes, in the order of their ranks; called in every process, also without batches.

    Args:
        batches: Tensors [B] or [B, D] in main memory.
        none: [0] or [0, 1], of the same type: the result if no process has a batch.

    Returns:
        [N] or [N, D].
    """
    if none.ndim == 2:  # a process without a batch learns the width from the others
        width = int(gather_uneven(torch.tensor([batches[0].shape[1] if batches else 1])).max())
        none = none.new_zeros(0, width)
    return gather_uneven(torch.cat([none, *batches]))
