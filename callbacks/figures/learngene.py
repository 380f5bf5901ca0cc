"""Images in TensorBoard of what the layers are summed of while a learngene is extracted."""

from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from PIL.Image import Image
from typing_extensions import override

from ..learngene.layers import TOWERS
from ..learngene.terms import LearngeneTerms, Values
from .charts import Chart, draw_bar_charts, draw_line_charts


class LearngeneFigures(Callback):
    """Draws the coefficients over the training so far, and how large both summands of each layer are now.

    A coefficient says little by itself, since its block may be as many times larger or smaller; the norms of the
    products are what can be compared. In TensorBoard: "train/coefficients" and "train/summand_norms".

    The module gives both as `learngene_terms() -> LearngeneTerms | None`, which every process calls. The history of the
    coefficients is in the checkpoint; when it has grown to `points` steps, every second one is dropped, and from then
    on they are recorded half as often.

    Args:
        every_n_epochs: epochs between two figures; the end of a fit has them too.
        every_n_steps: optimizer steps between two recorded values, at first.
        points: number of recorded steps that are kept.
    """

    def __init__(self, every_n_epochs: int = 1, every_n_steps: int = 50, points: int = 500) -> None:
        super().__init__()
        for name, value, least in (
            ("every_n_epochs", every_n_epochs, 1),
            ("every_n_steps", every_n_steps, 1),
            ("points", points, 2),
        ):
            if value < least:
                raise ValueError(f"{name}={value} of LearngeneFigures must be at least {least}.")
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
        """Checks before training that there is something to draw, and says where it has no place.

        Raises:
            AttributeError: If the module has no such sums.
        """
        if stage != "fit":
            return
        if not callable(getattr(pl_module, "learngene_terms", None)):
            raise AttributeError(
                f"LearngeneFigures found no method learngene_terms() in {type(pl_module).__name__}: train a module "
                "that extracts a learngene, such as MMLGModule, or leave the callback out."
            )
        lacking = None
        self._has_sums = pl_module.learngene_terms() is not None  # type: ignore[operator]
        if not self._has_sums:
            lacking = "the student has no such sums; leave the callback out."
        elif not _loggers(trainer):
            lacking = "the run has no TensorBoardLogger; add one to trainer.logger, or leave the callback out."
        if lacking is not None and not self._warned and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._warned = True
            rank_zero_warn(f"LearngeneFigures draws nothing: {lacking}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self.history = {}  # of another fit
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
        loggers = _loggers(trainer)
        if not self._has_sums or not loggers:
            return
        self._drawn = trainer.global_step
        now: LearngeneTerms = pl_module.learngene_terms()
        if not trainer.is_global_zero:
            return
        figures = {
            "train/coefficients": draw_coefficients({**self.history, self._drawn: now.coefficients}),
            "train/summand_norms": draw_norms(now.norms),
        }
        for logger in loggers:
            for tag, figure in figures.items():
                logger.experiment.add_image(tag, np.asarray(figure), self._drawn, dataformats="HWC")


def draw_coefficients(history: dict[int, Values]) -> Image:
    """Draw four charts, with a line for each pair of layers.

    Args:
        history: coefficients by optimizer step, in order, at least one.
    """
    charts = []
    for name in (name for tower in TOWERS for name in (tower, f"{tower}_multimodal")):
        rows = [values[name] for values in history.values()]
        lines = {f"layers {_layers(pair)}": list(line) for pair, line in enumerate(zip(*rows, strict=True))}
        charts.append(Chart(f"coefficients, {name.replace('_', ', ')}", lines))
    return draw_line_charts(charts, list(history), "optimizer step")


def draw_norms(norms: Values) -> Image:
    """Draw a chart for each tower, with two bars for each pair of layers.

    Args:
        norms: as in `LearngeneTerms`.
    """
    charts = [
        Chart(
            f"norms of the summands, {tower}",
            {"tower's own block": norms[tower], "multimodal block": norms[f"{tower}_multimodal"]},
        )
        for tower in TOWERS
    ]
    return draw_bar_charts(charts, [_layers(pair) for pair in range(len(norms[TOWERS[0]]))], "layers")


def _layers(pair: int) -> str:
    """The two layers that are a pair."""
    return f"{2 * pair} and {2 * pair + 1}"


def _loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
