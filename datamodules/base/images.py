"""The transforms of the datamodules of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from ...common.preprocessing import transform_record
from ..transforms.albef import pair_eval_transform
from ..transforms.normalize import ToNormalized, in_pixels, normalization_of, normalized
from .contract import ExpectsPreprocessing, asked_of


class ImageTransforms(pl.LightningDataModule):
    """Transforms of training and evaluation, and their description; a base class of the datamodules of images.

    It stands before `SampledDataModule` among the base classes.

    Loader workers apply `worker_transform`: they send uint8, a quarter of the bytes of float32. In a run, the
    images are normalized after their transfer, on the device; without a running trainer, by the loader. The values are
    those of the transform, bit for bit. A transform that is no `NormalizedTransform`
    (`ProbeTrainTransform`, which erases after the normalization, and those of users) sends what it returns.

    Args:
        train_transform: RGB image to float [3, H, W], for training; None for the datamodule's default.
        eval_transform: RGB image to float [3, H, W], for evaluation and prediction; None for the datamodule's default.
    """

    asks: ClassVar[tuple[type, ...]] = (ExpectsPreprocessing,)
    default_image_size: ClassVar[int | None] = None
    """Side of the images without an argument and without trained weights."""
    _image_size: int | None = None
    _train_finish: ToNormalized | None = None
    _eval_finish: ToNormalized | None = None

    def __init__(
        self, *, train_transform: nn.Module | None = None, eval_transform: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._train_transform = train_transform
        self._eval_transform = eval_transform

    @property
    def image_size(self) -> int:
        """Side of the square images, pixels: that of the argument, else what trained weights expect, else the default.

        Raises:
            AttributeError: If there is none of them.
        """
        size: int | None = (
            self._image_size or self.expected_preprocessing().get("image_size") or self.default_image_size
        )
        if size is None:
            raise AttributeError(f"{type(self).__name__} sets no image_size")
        return size

    @image_size.setter
    def image_size(self, size: int | None) -> None:
        self._image_size = size

    def default_train_transform(self) -> nn.Module:
        """Return the training transform that is used if none was given."""
        raise NotImplementedError

    def default_eval_transform(self) -> nn.Module:
        """Return the evaluation transform that is used if none was given: what trained weights expect, else ALBEF's."""
        return pair_eval_transform(self.image_size, self.expected_preprocessing())

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

    def worker_transform(self, training: bool) -> nn.Module:
        """Return what loader workers apply to an image: the transform without its normalization, if it can be divided.

        The normalization is that of the next batches of training, or of evaluation and prediction.
        """
        if training:
            transform = self.train_transform
            self._train_finish = normalization_of(transform)
        else:
            transform = self.eval_transform
            self._eval_finish = normalization_of(transform)
        return in_pixels(transform)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device, and normalize its images there."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        assert self.trainer is not None
        finished = self.normalized_batch(moved, self.trainer.training)
        # Before the transfer the trainer converted floats to its precision.
        return moved if finished is moved else self.trainer.precision_plugin.convert_input(finished)

    def read_batch(self, batch: Any, training: bool) -> Any:
        """Return a batch of a loader; its images are normalized unless a running trainer will transfer the batch."""
        state = getattr(self.trainer, "state", None)
        if state is not None and state.status == TrainerStatus.RUNNING:
            return batch
        return self.normalized_batch(batch, training)

    def normalized_batch(self, batch: Any, training: bool) -> Any:
        """Return a batch of training, or of evaluation, with normalized images."""
        return normalized(batch, self._train_finish if training else self._eval_finish)

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """Preprocessing of images in evaluation, as plain data; None if no images are read."""
        return transform_record(self.eval_transform)

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
