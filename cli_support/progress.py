"""A progress bar that stays on one line, and the numbers of an evaluation as a table that can be read."""

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    CustomBarColumn,
    ProcessingSpeedColumn,
    RichProgressBarTheme,
)
from rich.table import Column
from typing_extensions import override

TIMES = len("0:00:00 • 0:00:00")
WIDEST_BAR = 40
NARROWEST_BAR = 6
METRICS = 36  # "loss: 12.04 recall_mean: 79.46" and a little more
SPEED = len("1000.00it/s ")


class OneLineProgressBar(RichProgressBar):
    """Lightning's rich progress bar, which breaks its metrics over several lines at 80 columns, on one line.

    The bar gives way first, then the speed; what is left of the metrics beyond the edge of the terminal is cut off.
    """

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_format=".4g"))

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        columns = super().configure_columns(trainer)
        epochs = len(self._get_train_description(max(trainer.current_epoch, trainer.max_epochs or 0)))
        batches = max([trainer.num_training_batches, *trainer.num_val_batches, *trainer.num_test_batches, 99])
        room = self._terminal_width() - epochs - len(f" {batches}/{batches} ") - TIMES - 2
        if room < METRICS + NARROWEST_BAR + SPEED:
            columns = [column for column in columns if not isinstance(column, ProcessingSpeedColumn)]
        else:
            room -= SPEED
        self._room_for_metrics = max(room - NARROWEST_BAR, 1)
        for column in columns:
            column._table_column = Column(no_wrap=True)
            if isinstance(column, CustomBarColumn):
                column.bar_width = min(max(room - METRICS, NARROWEST_BAR), WIDEST_BAR)
        return columns

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """`train/loss` as `loss`, and without the number of the run, which its folder says."""
        metrics: Any = super().get_metrics(trainer, pl_module)
        return {name.rpartition("/")[2]: value for name, value in metrics.items() if name != "v_num"}

    def _init_progress(self, trainer: Trainer) -> None:
        super()._init_progress(trainer)
        if self._metric_component is not None:
            self._metric_component._table_column = Column(
                no_wrap=True, overflow="ellipsis", max_width=self._room_for_metrics
            )

    def _terminal_width(self) -> int:
        console: Any = self._console
        return int(console.width) if console is not None else shutil.get_terminal_size().columns


def results_table(results: Sequence[Mapping[str, float]]) -> str:
    """Names and values in two columns, in the order of the names with numbers counted: r1, r5, r10.

    Args:
        results: What `Trainer.test` returns, a dict for each loader; names of one of several loaders say which.

    Returns:
        Lines, each with its end; nothing without results.
    """
    values = {name: value for result in results for name, value in result.items()}
    width = max(map(len, values), default=0)
    return "".join(f"{name:<{width}}  {_readable(values[name]):>8}\n" for name in sorted(values, key=_counted))


def _counted(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _readable(value: float) -> str:
    """Four significant digits, and never fewer than those of a whole number."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
