"""What `predict` says of pictures that are to be classified, as a Parquet file."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from .distributed import gather_uneven
from .tables import prediction_folder, write_table


class ClassPredictionWriter(Callback):
    """Writes `predictions.parquet` after `predict`, a row for each picture in the order of the data.

    Columns: sample_index; image, its path, or its source and row; label, the most probable class; name of that class;
    probability; top_labels and top_probabilities, the `top_k` most probable, best first. Names come from the
    datamodule's `picture_name` and `class_names`; what is not known is null. The file is written beside its place and
    then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: classes in the lists.
        folder: where the file goes, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        ValueError: if `top_k` is below 1, or `predict_step` returns something else.
    """

    def __init__(self, top_k: int = 5, folder: str | None = None) -> None:
        super().__init__()
        if top_k < 1:
            raise ValueError(f"top_k={top_k} of ClassPredictionWriter must be at least 1.")
        self.top_k = top_k
        self.folder = folder
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts = []

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
        if not isinstance(outputs, dict) or not {"sample_index", "probabilities"} <= outputs.keys():
            raise ValueError(
                f"predict_step of {type(pl_module).__name__} returned no sample_index and probabilities, which "
                "ClassPredictionWriter writes: leave the callback out, or return them."
            )
        probabilities = outputs["probabilities"].float()
        best = probabilities.topk(min(self.top_k, probabilities.shape[1]))
        self._parts.append((outputs["sample_index"].cpu(), best.indices.cpu(), best.values.cpu()))

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A process may have got no batch at all, and then knows the number of columns from the others.
        width = int(gather_uneven(torch.tensor([self._parts[0][1].shape[1] if self._parts else 0])).max())
        none = (torch.zeros(0, dtype=torch.long), torch.zeros(0, width, dtype=torch.long), torch.zeros(0, width))
        index, labels, probabilities = (
            gather_uneven(torch.cat(column)) for column in zip(*(self._parts or [none]), strict=True)
        )
        self._parts = []
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            order = index.argsort()
            self._write(trainer, index[order], labels[order], probabilities[order])

    def _write(self, trainer: Trainer, index: Tensor, labels: Tensor, probabilities: Tensor) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        named, names = hasattr(data, "picture_name"), getattr(data, "class_names", None)
        pictures = [data.picture_name("predict", number) if named else None for number in index.tolist()]
        first = labels[:, 0].tolist()
        starts = np.arange(len(index) + 1, dtype=np.int32) * labels.shape[1]
        table = pa.table(
            {
                "sample_index": index.numpy(),
                "image": pa.array(pictures, "string"),
                "label": labels[:, 0].numpy(),
                "name": pa.array([names[label] if names else None for label in first], "string"),
                "probability": probabilities[:, 0].numpy(),
                "top_labels": pa.ListArray.from_arrays(starts, labels.numpy().reshape(-1)),
                "top_probabilities": pa.ListArray.from_arrays(starts, probabilities.numpy().reshape(-1)),
            }
        )
        file = prediction_folder(trainer, self.folder) / "predictions.parquet"
        write_table(table, file)
        rank_zero_info(f"{len(index)} pictures: their classes are in {file}.")
