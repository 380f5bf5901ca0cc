"""Figures and settings in any of TensorBoard, Weights & Biases and files beside a CSV log."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from ..common.urls import hidden

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

KINDS = (TensorBoardLogger, WandbLogger, CSVLogger)
NO_LOGGER = "the run has no TensorBoardLogger, WandbLogger or CSVLogger; add one to trainer.logger"


def shows_figures(trainer: Trainer) -> bool:
    """Return whether a logger of the run shows figures."""
    return any(isinstance(logger, KINDS) for logger in trainer.loggers)


def log_figure(trainer: Trainer, name: str, figure: "Figure") -> None:
    """Show a figure in each logger under the current step; only rank 0 calls this.

    Beside a CSV log it is the file `figures/<name>-step<n>.png`.

    Args:
        trainer: The Trainer.
        name: Such as "val/retrieval".
        figure: The figure.
    """
    step = trainer.global_step
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [_drawn(figure)], step)
        elif isinstance(logger, CSVLogger):
            file = Path(logger.log_dir, "figures", f"{name}-step{step}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            _drawn(figure).save(file)


def log_settings(trainer: Trainer, name: str, settings: Mapping[str, Any]) -> None:
    """Show plain settings without secrets of URLs: as text in TensorBoard, in W&B's config; only rank 0 calls this.

    A CSV log has none, since its folder is that of the files.
    """
    settings = hidden(settings)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
            logger.experiment.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), 0)
        elif isinstance(logger, WandbLogger):
            logger.experiment.config.update({name: dict(settings)}, allow_val_change=True)


def _drawn(figure: "Figure") -> "Image.Image":
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
