"""The transforms of the datamodules of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from ..transforms.normalize import preprocessing_of
from .contract import ExpectsPreprocessing, asked_of


class ImageTransforms:
    """Transforms of training and evaluation, and their description; a base class of the datamodules of images.

    The constructor of the datamodule sets ``_train_transform`` and ``_eval_transform``; None selects the default.
    """

    trainer: pl.Trainer | None
    _train_transform: nn.Module | None
    _eval_transform: nn.Module | None

    def default_train_transform(self) -> nn.Module:
        """Return the training transform that is used if none was given."""
        raise NotImplementedError

    def default_eval_transform(self) -> nn.Module:
        """Return the evaluation transform that is used if none was given."""
        raise NotImplementedError

    @property
    def train_transform(self) -> nn.Module:
        """RGB image to float [3, H, W], for training."""
        return self.default_train_transform() if self._train_transform is None else self._train_transform

    @train_transform.setter
    def train_transform(self, transform: nn.Module) -> None:
        self._train_transform = transform

    @property
    def eval_transform(self) -> nn.Module:
        """RGB image to float [3, H, W], for evaluation and prediction."""
        return self.default_eval_transform() if self._eval_transform is None else self._eval_transform

    @eval_transform.setter
    def eval_transform(self, transform: nn.Module) -> None:
        self._eval_transform = transform

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """Preprocessing of images in evaluation, as plain data; None if no images are read."""
        return preprocessing_of(self.eval_transform)

    @property
    def normalization(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation that training images are normalized with, or None if unknown."""
        finish: Any = getattr(self.train_transform, "finish", None)
        return (finish.mean, finish.std) if hasattr(finish, "mean") and hasattr(finish, "std") else None

    def expected_preprocessing(self) -> Mapping[str, Any]:
        """Return the preprocessing that the trainer's module expects; empty without a module."""
        module = asked_of(self.trainer, ExpectsPreprocessing)  # type: ignore[type-abstract]
        expected = {} if module is None else module.expected_preprocessing()
        if "transform" in expected:
            rank_zero_warn(
                f"The weights were evaluated with the transform {expected['transform']}, which a checkpoint does not "
                "contain: set data.eval_transform to it; otherwise the images are preprocessed differently."
            )
        return expected
