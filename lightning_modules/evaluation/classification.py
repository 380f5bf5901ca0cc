"""Evaluation and predictions of image classifiers."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ...callbacks.distributed.collectives import gather_uneven
from ...common.errors import UserError
from ...common.log import log_global
from ...metrics.classification import hits
from ...metrics.finite import some_of
from ..base.trainers import datamodule_of
from .protocol import PREFIXES, Stage

Batch = dict[str, Tensor]

SPLITS, TOP = ("val", "test"), (1, 5)


class Accuracy(nn.Module):
    """Accuracy of each evaluation split in percent, over the images of all processes.

    With fewer than five classes, top-5 uses all classes. An image whose class has a non-finite logit counts as wrong.

    Shapes: B images, C classes.
    """

    def __init__(self) -> None:
        super().__init__()
        # Zeros and ones need no check for NaN, for which the host would wait for a GPU.
        means = {f"{split}_top{k}": MeanMetric(nan_strategy="disable") for split in SPLITS for k in TOP}
        self.metrics = nn.ModuleDict(means)
        self._non_finite: dict[str, list[Tensor]] = {
            split: [] for split in SPLITS
        }  # [B, 2]: sample_index, whether non-finite

    def update(self, split: str, logits: Tensor, label: Tensor, sample_index: Tensor) -> None:
        """Count a batch: logits [B, C], label [B], positions in the data set [B]."""
        right = hits(logits, label, max(TOP))
        for k, metric in self._of(split):
            metric.update(right[:, :k].any(1).float())
        self._non_finite[split].append(torch.stack([sample_index, (~logits.isfinite().all(1)).long()], 1))

    def log(self, module: LightningModule, split: str) -> None:
        """Log `<split>/top1` and `<split>/top5` from a module's hook, and reset the counts.

        The number of images with non-finite logits, if there are any, is logged as `<split>/non_finite`, and a
        warning names them.
        """
        found: dict[str, Tensor | float] = {}
        for k, metric in self._of(split):
            found[f"top{k}"] = 100 * metric.compute()
            metric.reset()
        none = torch.zeros(0, 2, dtype=torch.long, device=module.device)  # for a process without images
        rows = gather_uneven(torch.cat([none, *self._non_finite[split]]))
        self._non_finite[split] = []
        if bad := int(rows[:, 1].sum()):
            found["non_finite"] = float(bad)
            rank_zero_warn(
                f"Found non-finite logits for {bad} of {len(rows)} images (sample_index "
                f"{some_of(rows[rows[:, 1] > 0, 0])}): these classes rank last; check these samples, or, if all "
                "images are affected, use an earlier checkpoint."
            )
        log_global(module, {f"{split}/{name}": value for name, value in found.items()}, f"{split}/top1")

    def reset(self) -> None:
        """Reset the counts."""
        for split in SPLITS:
            for _, metric in self._of(split):
                metric.reset()
        self._non_finite = {split: [] for split in SPLITS}

    def _of(self, split: str) -> Iterator[tuple[int, MeanMetric]]:
        for k in TOP:
            metric = self.metrics[f"{split}_top{k}"]
            assert isinstance(metric, MeanMetric)
            yield k, metric


class ClassificationEvaluation(nn.Module):
    """Loss and accuracy of a classifier, and its predictions.

    The module's `forward` turns images [B, 3, H, W] into logits [B, C]. A batch holds `image`, `sample_index` and, but
    for predictions, `label`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy()

    def start(self) -> None:
        """Reset the counts."""
        self.accuracy.reset()

    def step(self, module: LightningModule, batch: Batch, stage: Stage) -> None:
        """Classify a batch, log the loss, and count correct images."""
        split, label = PREFIXES[stage], batch["label"]
        logits = module(batch["image"]).float()
        self.accuracy.update(split, logits, label, batch["sample_index"])
        module.log(f"{split}/loss", F.cross_entropy(logits, label), sync_dist=True, batch_size=len(label))

    def predict(self, module: LightningModule, batch: Batch) -> Batch:
        """Return probabilities [B, C], with the positions [B] of the images in their data set."""
        return {"sample_index": batch["sample_index"], "probabilities": module(batch["image"]).float().softmax(-1)}

    def finish(self, module: LightningModule, stage: Stage) -> None:
        """Log accuracy in percent."""
        if stage != "predict":
            self.accuracy.log(module, PREFIXES[stage])


def check_classes(module: LightningModule, num_classes: int) -> None:
    """Compare a number of classes with that of the run's datamodule, if any; for `on_fit_start`.

    Raises:
        UserError: if the numbers differ.
    """
    found = getattr(datamodule_of(module), "num_classes", None)
    if found is not None and found != num_classes:
        raise UserError(
            f"Expected as many classes in the data as in the model, {num_classes}, got {found}: set model.num_classes, "
            "or data.num_classes for both."
        )
