"""Top-1 and top-5 accuracy, as every classifier here reports it."""

from collections.abc import Iterator

from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

SPLITS, TOP = ("val", "test"), (1, 5)


class Accuracy(nn.Module):
    """Accuracy of each evaluation split in percent, over the pictures of all processes.

    Shapes: B pictures, C classes.

    Args:
        classes: number C; with fewer than five, top-5 counts as many as there are.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict(
            {
                f"{split}_top{k}": MulticlassAccuracy(classes, top_k=min(k, classes), average="micro")
                for split in SPLITS
                for k in TOP
            }
        )

    def update(self, split: str, logits: Tensor, label: Tensor) -> None:
        """Count a batch: logits [B, C], label [B]."""
        for _, metric in self._of(split):
            metric.update(logits, label)

    def log(self, module: LightningModule, split: str) -> None:
        """Log `<split>/top1` and `<split>/top5` from a module's hook, and start counting afresh."""
        for k, metric in self._of(split):
            value = 100 * metric.compute()
            metric.reset()
            # Every process has computed the same number; the mean over them only keeps Lightning from warning.
            module.log(f"{split}/top{k}", value, prog_bar=k == 1, sync_dist=True)

    def _of(self, split: str) -> Iterator[tuple[int, MulticlassAccuracy]]:
        for k in TOP:
            metric = self.metrics[f"{split}_top{k}"]
            assert isinstance(metric, MulticlassAccuracy)
            yield k, metric
