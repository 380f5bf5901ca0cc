"""A base for figures of an evaluation in the loggers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL.Image import Image, fromarray
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT, CheckedArguments
from ...common.tokenizers import decoded_text
from .grid import Row, draw_rows, missing_glyphs

Split = Literal["validation", "test"]
KINDS = (TensorBoardLogger, WandbLogger, CSVLogger)
NO_LOGGER = "the run has no TensorBoardLogger, WandbLogger or CSVLogger; add one to trainer.logger"


class EvaluationFigures(CheckedArguments, Callback):
    """Draw a figure of an evaluation after every validation and test; where that is impossible, warn once.

    A subclass makes the rows from the evaluation's result and from the images that are shown. The datamodule opens
    these images again, so that an evaluation keeps no images.
    """

    name: str  # of the figure, after "val/" or "test/"
    module_needs: str | None = None  # a method of the module
    evaluates = "retrieval"  # what the module's evaluation does, for messages
    result_needs = "near_images"  # an attribute of the evaluation's result

    def __init__(self, every_n_epochs: Annotated[int, COUNT]) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self._warned = False

    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        """Return the rows of the figure. Every process calls this; the rows of rank 0 are drawn."""
        raise NotImplementedError

    def show(self, trainer: Trainer, name: str, rows: list[Row]) -> None:
        """Show rows in the loggers; rank 0 calls this."""
        with missing_glyphs():
            log_figure(trainer, name, draw_rows(rows))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        in_training = trainer.state.fn == "fit"
        if trainer.sanity_checking or (in_training and (trainer.current_epoch + 1) % self.every_n_epochs):
            return
        self._draw(trainer, pl_module, "val", "validation")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module, "test", "test")

    def _draw(self, trainer: Trainer, pl_module: LightningModule, prefix: str, split: Split) -> None:
        lacking = self._lacking(trainer, pl_module)
        if lacking is None:
            try:
                rows = self.rows(trainer, pl_module, split)
            except NoFigureError as error:
                lacking = str(error)
        if lacking is not None:
            if not self._warned and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                rank_zero_warn(f"{type(self).__name__} draws nothing: {lacking}")
            self._warned = True
        elif rows and trainer.is_global_zero:
            self.show(trainer, f"{prefix}/{self.name}", rows)

    def _lacking(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        """Return the reason why no figure can be drawn, if any: the end of a sentence, the same in every process."""
        module = type(pl_module).__name__
        if not shows_figures(trainer):
            return f"{NO_LOGGER}, or leave the callback out."
        if not hasattr(getattr(getattr(pl_module, "evaluation", None), "result", None), self.result_needs):
            return f"{module} has no {self.evaluates} evaluation; leave the callback out."
        if self.module_needs is not None and not hasattr(pl_module, self.module_needs):
            return f"{module} has no {self.module_needs}(); leave the callback out."
        if not hasattr(getattr(trainer, "datamodule", None), "image"):
            return "the run has no datamodule with image(), which opens an image again; leave the callback out."
        return None


class NoFigureError(Exception):
    """The reason why no figure can be drawn, as the end of a sentence."""


def open_image(data: Any, split: Split, sample_index: Tensor) -> Image:
    """Open an image of the evaluation again.

    Raises:
        NoFigureError: If it cannot be opened.
    """
    try:
        image: Image = data.image(split, int(sample_index))
    except (UserError, ValueError) as error:  # streamed, or deleted since its evaluation
        raise NoFigureError(f"an image could not be opened: {error}") from error
    return image


def heat_maps(trainer: Trainer, pl_module: Any, method: str, images: Sequence[Image], *tokens: Tensor) -> Any:
    """Return the maps of a method of the module, in the precision of the Trainer.

    Every process calls this, since processes that share a model's weights communicate.

    Args:
        trainer: Its datamodule prepares the images.
        pl_module: The module.
        method: Name of its method, which takes images [B, 3, H, W] and the tokens.
        images: Images of any size.
        *tokens: Token ids and masks [B, L].
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    device = pl_module.device
    plugin = trainer.precision_plugin
    tensors = torch.stack([data.eval_transform(image) for image in images]).to(device)
    with plugin.forward_context():
        return getattr(pl_module, method)(plugin.convert_input(tensors), *(ids.to(device) for ids in tokens))


def evenly_spread(total: int, count: int) -> list[int]:
    """Return at most `count` evenly spread indices below `total`, the first and the last among them."""
    count = min(count, total)
    return [number * (total - 1) // max(count - 1, 1) for number in range(count)]


def token_ids(result: Any, text: int) -> Tensor:
    """Return the token ids of a text, without padding."""
    ids: Tensor = result.input_ids[text][result.attention_mask[text].bool()]
    return ids


def captions_of(data: Any, split: Split, result: Any, texts: Sequence[int]) -> list[str]:
    """Return texts as the datamodule's `captions(split, sample_index)` has them, else as the model read them."""
    read = [decoded_text(data.tokenizer, token_ids(result, text)) for text in texts]
    matches = result.matches
    if matches is None or not hasattr(data, "captions"):
        return read
    owners = matches.text_image_id[texts]
    images = (matches.image_id == owners[:, None]).int().argmax(1)
    try:
        written = data.captions(split, result.sample_index[images].tolist())
    except (UserError, ValueError):  # streamed: opening an image then raises the NoFigureError
        return read
    for number, (text, owner) in enumerate(zip(texts, owners, strict=True)):
        # The captions of an image are evaluated together and in their order.
        of_image = (matches.text_image_id == owner).nonzero().flatten().tolist()
        if len(of_image) == len(written[number]):
            read[number] = " ".join(written[number][of_image.index(text)].split())
    return read


def shows_figures(trainer: Trainer) -> bool:
    """Return whether a logger of the run shows figures."""
    return any(isinstance(logger, KINDS) for logger in trainer.loggers)


def log_figure(trainer: Trainer, name: str, figure: Figure) -> None:
    """Show a figure in each logger under the current step; only rank 0 calls this.

    Beside a CSV log it is the file `figures/<name>-step<n>.png`.
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


def _drawn(figure: Figure) -> Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
