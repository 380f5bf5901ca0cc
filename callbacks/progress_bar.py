"""The progress of a run as a bar on one line, in a terminal or a notebook."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    CustomBarColumn,
    ProcessingSpeedColumn,
    RichProgressBarTheme,
)
from rich import get_console
from rich.console import Console
from typing_extensions import override

from .progress import ProgressLines, short_number

TIMES = len("0:00:00 • 0:00:00")
WIDEST_BAR = 40
NARROWEST_BAR = 6
METRICS = 36  # "loss: 12.04 recall_mean: 79.46" and a margin
SPEED = len("1000.00it/s ")


class OneLineProgressBar(RichProgressBar):
    """Lightning's rich progress bar, which breaks its metrics over several lines at 80 columns, on one line.

    In a narrow terminal the bar becomes shorter first, then the speed disappears, then the last metrics.
    """

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_format=".4g"))
        self._room_for_metrics = METRICS

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        columns = super().configure_columns(trainer)
        last = max(trainer.current_epoch, trainer.max_epochs or 0)
        epochs = max(len(f"Epoch {last}/{last - 1}"), len(self.validation_description))
        batches = max([trainer.num_training_batches, *trainer.num_val_batches, *trainer.num_test_batches, 99])
        room = get_console().width - epochs - len(f" {batches}/{batches} ") - TIMES - 2
        if room < METRICS + NARROWEST_BAR + SPEED:
            columns = [column for column in columns if not isinstance(column, ProcessingSpeedColumn)]
        else:
            room -= SPEED
        bar = min(max(room - METRICS, NARROWEST_BAR), WIDEST_BAR)
        for column in columns:
            if isinstance(column, CustomBarColumn):
                column.bar_width = bar
        self._room_for_metrics = room - bar
        return columns

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """Show `train/loss` as `loss`, and leave out the version number, which the run folder shows."""
        metrics: Any = super().get_metrics(trainer, pl_module)
        shown: dict[str, Any] = {}
        length = 0
        for name, value in metrics.items():
            short = name.rpartition("/")[2]
            if name != "v_num":
                length += len(f"{short}: {short_number(value)} ")
                shown |= {short: value} if length <= self._room_for_metrics else {}
        return shown


def progress_of_output() -> ProgressBar:
    """Return a bar for a terminal or a notebook, and lines for a file, a pipe, or a terminal without cursor."""
    console = Console()
    return OneLineProgressBar() if console.is_interactive or console.is_jupyter else ProgressLines()
