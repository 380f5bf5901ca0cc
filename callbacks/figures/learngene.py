"""Figures of the weighted sums in the extraction of a learngene."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT, CheckedArguments, Range
from ..learngene.layers import TOWERS, LearngeneTerms, Values
from .evaluation import NO_LOGGER, log_figure, shows_figures


class LearngeneFigures(CheckedArguments, Callback):
    """Draw the coefficients over training, and the current norms of both terms of each layer.

    A coefficient alone is not comparable, since its block has a free scale; the norms of the products are. The
    loggers show them as "train/coefficients" and "train/summand_norms".

    The module's method `learngene_terms() -> LearngeneTerms | None` gives both; every rank calls it. The history of the
    coefficients is in the checkpoint. When it exceeds `points` steps, every second step is dropped, and the interval
    between recorded steps doubles.

    Args:
        every_n_epochs: Epochs between two figures; the end of a fit draws them too.
        every_n_steps: Initial number of optimizer steps between two recorded values.
        points: Maximum number of recorded steps.
    """

    def __init__(
        self,
        every_n_epochs: Annotated[int, COUNT] = 1,
        every_n_steps: Annotated[int, COUNT] = 50,
        points: Annotated[int, Range(least=2)] = 500,
    ) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self.points = points
        self.interval = every_n_steps
        self.history: dict[int, Values] = {}
        """Coefficients by optimizer step, in order."""
        self._drawn: int | None = None
        self._warned = False
        self._has_sums = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"interval": self.interval, "history": dict(self.history)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.interval = state_dict["interval"]
        self.history = dict(state_dict["history"])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that there are terms to draw, and a logger to draw them for.

        Raises:
            UserError: If the module has no such terms.
        """
        if stage != "fit":
            return
        if not callable(getattr(pl_module, "learngene_terms", None)):
            raise UserError(
                "Expected a module with a method learngene_terms() for LearngeneFigures, got "
                f"{type(pl_module).__name__}: train a module that extracts a learngene, such as MMLGModule, or remove "
                "the callback."
            )
        lacking = None
        self._has_sums = pl_module.learngene_terms() is not None  # type: ignore[operator]
        if not self._has_sums:
            lacking = "the student has no such sums; remove the callback."
        elif not shows_figures(trainer):
            lacking = f"{NO_LOGGER}, or remove the callback."
        if lacking is not None and not self._warned and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._warned = True
            rank_zero_warn(f"LearngeneFigures draws nothing: {lacking}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self.history = {}  # that of an earlier fit
        self._record(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._record(trainer, pl_module)

    def _record(self, trainer: Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        if not self._has_sums or step % self.interval or step in self.history:
            return
        self.history[step] = pl_module.learngene_terms().coefficients
        while len(self.history) > self.points:
            self.interval *= 2
            self.history = {step: values for step, values in self.history.items() if step % self.interval == 0}

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._drawn:
            self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: Any) -> None:
        if not self._has_sums or not shows_figures(trainer):
            return
        self._drawn = trainer.global_step
        now: LearngeneTerms = pl_module.learngene_terms()
        if not trainer.is_global_zero:
            return
        figures = {
            "train/coefficients": draw_coefficients({**self.history, self._drawn: now.coefficients}),
            "train/summand_norms": draw_norms(now.norms),
        }
        for name, figure in figures.items():
            log_figure(trainer, name, figure)


def draw_coefficients(history: dict[int, Values]) -> Figure:
    """Draw a chart for each block of each tower, with a line for each pair of layers.

    Args:
        history: Coefficients by optimizer step, in order, at least one.
    """
    figure, axes = _charts(2, "optimizer step")
    for chart, name in zip(axes, (name for tower in TOWERS for name in (tower, f"{tower}_multimodal")), strict=True):
        values = np.array([coefficients[name] for coefficients in history.values()])
        chart.set_title(f"coefficients, {name.replace('_', ', ')}")
        for pair, color in enumerate(_colors(values.shape[1])):
            line = np.where(np.isfinite(values[:, pair]), values[:, pair], np.nan)
            chart.plot(list(history), line, color=color, marker="o", markevery=[-1], label=f"layers {_layers(pair)}")
    return _with_legend(figure, axes)


def draw_norms(norms: Values) -> Figure:
    """Draw a chart for each tower, with two bars for each pair of layers.

    Args:
        norms: As in `LearngeneTerms`.
    """
    figure, axes = _charts(1, "layers")
    blocks = (("tower's own block", ""), ("multimodal block", "_multimodal"))
    for chart, tower in zip(axes, TOWERS, strict=True):
        chart.set_title(f"norms of the summands, {tower}")
        for number, ((label, suffix), color) in enumerate(zip(blocks, _colors(2), strict=True)):
            heights = np.array(norms[f"{tower}{suffix}"])
            positions = np.arange(len(heights)) + 0.35 * (number - 0.5)
            chart.bar(positions, np.where(np.isfinite(heights), heights, np.nan), 0.35, color=color, label=label)
        chart.set_xticks(range(len(norms[tower])), [_layers(pair) for pair in range(len(norms[tower]))])
    return _with_legend(figure, axes)


def _charts(rows: int, x_label: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with rows of two charts that share their scales."""
    figure = Figure(figsize=(10, 3.2 * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, 2, sharex=True, sharey=True).flat)
    for chart in axes:
        chart.grid(color="0.9")
        chart.set_axisbelow(True)
        chart.set_xlabel(x_label)
        chart.tick_params(labelbottom=True, labelleft=True)
    return figure, axes


def _with_legend(figure: Figure, axes: list[Axes]) -> Figure:
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, handlelength=1, frameon=False)
    return figure


def _colors(count: int) -> Any:
    return colormaps["viridis"](np.linspace(0, 0.9, count))


def _layers(pair: int) -> str:
    """Return the two layers of a pair."""
    return f"{2 * pair} and {2 * pair + 1}"
