"""The base of all datamodules of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from ..transforms.normalize import preprocessing_of
from .contract import ExpectsPreprocessing
from .sampled import SampledDataModule


class ImageDataModule(SampledDataModule):
    """Images in batches of the project's contract (dicts of tensors).

    A subclass passes the arguments below, and those of :class:`SampledDataModule`, on as ``**options``. It declares one
    of them only to change its default.

    Args:
        train_transform: RGB image to float [3, H, W], for training; None for the datamodule's own.
        eval_transform: RGB image to float [3, H, W], for evaluation and prediction; None for the datamodule's own.
        **options: see :class:`SampledDataModule`.
    """

    asks: ClassVar[tuple[type, ...]] = (ExpectsPreprocessing,)

    def __init__(
        self, *, train_transform: nn.Module | None = None, eval_transform: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._train_transform = train_transform
        self._eval_transform = eval_transform

    def default_train_transform(self) -> nn.Module:
        """Return the training transform if none was given."""
        raise NotImplementedError

    def default_eval_transform(self) -> nn.Module:
        """Return the evaluation transform if none was given."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base, and the preprocessing of evaluation."""
        return super().state_dict() | {"preprocessing": self.preprocessing}

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
        """What evaluation does to an image, as plain data; None if no images are read."""
        return preprocessing_of(self.eval_transform)

    @property
    def normalization(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation that training images are normalized with, or None if unknown."""
        finish: Any = getattr(self.train_transform, "finish", None)
        return (finish.mean, finish.std) if hasattr(finish, "mean") and hasattr(finish, "std") else None

    def expected_preprocessing(self) -> Mapping[str, Any]:
        """Return the preprocessing that the trainer's module expects; empty without a module."""
        module = self.module_as(ExpectsPreprocessing)  # type: ignore[type-abstract]
        expected = {} if module is None else module.expected_preprocessing()
        if "transform" in expected:
            rank_zero_warn(
                f"The weights were evaluated with the transform {expected['transform']}, which a checkpoint does not "
                "contain: set data.eval_transform to it, or the images are preprocessed differently."
            )
        return expected
