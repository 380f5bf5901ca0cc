"""Evaluation and predictions of classifiers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ...callbacks.distributed.collectives import gather_uneven
from ...callbacks.modules import on_any_rows
from ...common.errors import UserError
from ...common.log import log_global
from ...metrics.classification import hits
from ...metrics.finite import some_of
from ..core.trainers import datamodule_of
from .protocol import PREFIXES, Stage, Summary

Batch = dict[str, Tensor]

SPLITS = ("val", "test")
TOP = {"top1": 1, "top5": 5}


class Accuracy(nn.Module):
    """Accuracy of each evaluation split in percent, over the images of all processes.

    With fewer than five classes, top-5 uses all classes. An image whose class has a non-finite logit counts as wrong.

    Args:
        top: number of best classes among which the right one counts, by the name under which the accuracy is logged.

    Shapes: B images, C classes.
    """

    def __init__(self, top: Mapping[str, int] = TOP) -> None:
        super().__init__()
        self.top = dict(top)
        self.classes = 0  # of the last batch
        # Zeros and ones need no check for NaN, for which the host would wait for a GPU.
        means = {f"{split}_{name}": MeanMetric(nan_strategy="disable") for split in SPLITS for name in top}
        self.metrics = nn.ModuleDict(means)
        self._non_finite: dict[str, list[Tensor]] = {
            split: [] for split in SPLITS
        }  # [B, 2]: sample_index, whether non-finite

    def update(self, split: str, logits: Tensor, label: Tensor, sample_index: Tensor) -> None:
        """Count a batch: logits [B, C], label [B], positions in the data set [B]."""
        self.classes = logits.shape[1]
        right = hits(logits, label, max(self.top.values()))
        for name, metric in self._of(split):
            metric.update(right[:, : self.top[name]].any(1).float())
        self._non_finite[split].append(torch.stack([sample_index, (~logits.isfinite().all(1)).long()], 1))

    def log(self, module: LightningModule, split: str) -> int:
        """Log `<split>/top1` and the others from a module's hook, reset the counts, and return the number of images.

        The number of images with non-finite logits, if there are any, is logged as `<split>/non_finite`, and a
        warning names them.
        """
        results: dict[str, Tensor | float] = {}
        for name, metric in self._of(split):
            results[name] = 100 * metric.compute()
            metric.reset()
        none = torch.zeros(0, 2, dtype=torch.long, device=module.device)  # for a process without images
        rows = gather_uneven(torch.cat([none, *self._non_finite[split]]))
        self._non_finite[split] = []
        if bad := int(rows[:, 1].sum()):
            results["non_finite"] = float(bad)
            rank_zero_warn(
                f"Found non-finite logits for {bad} of {len(rows)} images (sample_index "
                f"{some_of(rows[rows[:, 1] > 0, 0])}): these classes rank last; check these samples, or, if all "
                "images are affected, use an earlier checkpoint."
            )
        log_global(
            module, {f"{split}/{name}": value for name, value in results.items()}, f"{split}/{next(iter(self.top))}"
        )
        return len(rows)

    def chance(self) -> dict[str, float]:
        """Return the accuracies of random classes, in percent; a process without images knows none."""
        return {name: 100 * min(k / self.classes, 1.0) for name, k in self.top.items() if self.classes}

    def reset(self) -> None:
        """Reset the counts."""
        for split in SPLITS:
            for _, metric in self._of(split):
                restart(metric)
        self._non_finite = {split: [] for split in SPLITS}

    def _of(self, split: str) -> Iterator[tuple[str, MeanMetric]]:
        for name in self.top:
            metric = self.metrics[f"{split}_{name}"]
            assert isinstance(metric, MeanMetric)
            yield name, metric


def restart(mean: MeanMetric) -> None:
    """Reset a mean whose sums are in float32 at least: those of `bf16-true`, as of the weights, would stop at 256."""
    mean.set_dtype(torch.promote_types(mean.dtype, torch.float32))
    mean.reset()


class Classified(NamedTuple):
    """The classified samples of all processes, those of rank 0 first."""

    sample_index: Tensor  # long [N]
    label: Tensor  # long [N]
    probabilities: Tensor  # float32 [N, C]


class ClassificationEvaluation(nn.Module):
    """Loss and accuracy of a classifier, and its predictions.

    The module's `forward` turns the inputs, such as images [B, 3, H, W], into logits [B, C]. A batch holds the inputs,
    `sample_index` and, but for predictions, `label`.

    Args:
        inputs: names of the batch's entries that `forward` takes.
        top: as in `Accuracy`.
        keeps_result: whether the attribute `result` keeps the probabilities of an evaluation, for figures.
    """

    def __init__(
        self, inputs: Sequence[str] = ("image",), top: Mapping[str, int] = TOP, keeps_result: bool = False
    ) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.accuracy = Accuracy(top)
        # Not Lightning's mean, which rounds the number of samples of a process where they differ.
        self.losses = nn.ModuleDict({split: MeanMetric(nan_strategy="disable") for split in SPLITS})
        self.keeps_result = keeps_result
        self.result: Classified | None = None
        self.summary: Summary | None = None
        self._classified: list[Classified] = []

    def start(self) -> None:
        """Reset the counts."""
        self.accuracy.reset()
        for split in SPLITS:
            restart(self._loss(split))
        self.result = None
        self._classified = []

    def step(self, module: LightningModule, batch: Batch, stage: Stage) -> None:
        """Classify a batch, and add its losses and its correct images."""
        split = PREFIXES[stage]
        label = batch["label"]
        logits = self._logits(module, batch)
        self.accuracy.update(split, logits, label, batch["sample_index"])
        self._loss(split).update(F.cross_entropy(logits, label, reduction="none"))
        if self.keeps_result:
            self._classified.append(Classified(batch["sample_index"], label, logits.detach().softmax(-1)))

    def predict(self, module: LightningModule, batch: Batch) -> Batch:
        """Return probabilities [B, C], with the positions [B] of the images in their data set."""
        return {"sample_index": batch["sample_index"], "probabilities": self._logits(module, batch).softmax(-1)}

    def finish(self, module: LightningModule, stage: Stage) -> None:
        """Log loss and accuracy, in percent."""
        if stage != "predict":
            split = PREFIXES[stage]
            log_global(module, {f"{split}/loss": self._loss(split).compute()})
            unit = "images" if self.inputs == ("image",) else "samples"
            self.summary = Summary({unit: self.accuracy.log(module, split)}, self.accuracy.chance())
        if self._classified:  # in all processes or in none: each has a batch in each step
            columns = zip(*self._classified, strict=True)
            self.result = Classified._make(gather_uneven(torch.cat(column).cpu()) for column in columns)
            self._classified = []

    def _loss(self, split: str) -> MeanMetric:
        metric = self.losses[split]
        assert isinstance(metric, MeanMetric)
        return metric

    def _logits(self, module: LightningModule, batch: Batch) -> Tensor:
        logits: Tensor = on_any_rows(module, *(batch[name] for name in self.inputs)).float()
        return logits


def check_classes(module: LightningModule, num_classes: int) -> None:
    """Compare a number of classes with that of the run's datamodule, if any; for `on_fit_start`.

    Raises:
        UserError: If the numbers differ.
    """
    data_classes = getattr(datamodule_of(module), "num_classes", None)
    if data_classes is not None and data_classes != num_classes:
        raise UserError(
            f"Expected as many classes in the data as in the model, {num_classes}, got {data_classes}: set "
            "model.num_classes, or data.num_classes for both."
        )
