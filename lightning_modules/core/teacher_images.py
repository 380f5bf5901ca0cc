"""Conversion of a student's images to those of its teacher."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .clip_preprocessing import Interpolation, Three


class Normalisation(NamedTuple):
    """Mean and standard deviation of normalised images."""

    mean: Three
    std: Three


class TeacherImages:
    """Convert images of the data to those that the teacher was trained with.

    Args:
        size: image size that the teacher requires, in pixels; None where it takes any.
        data: normalisation of the data's images; None if the teacher accepts them unchanged.
        teacher: normalisation of the teacher's images; None if the teacher accepts them unchanged.
        interpolation: interpolation of the resize.
    """

    def __init__(
        self,
        size: int | None,
        data: Normalisation | None,
        teacher: Normalisation | None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = size
        self.interpolation = interpolation
        self.numbers = None if data is None or teacher is None or data == teacher else (*data, *teacher)
        # One copy per type and device: copying in each step would wait for the device.
        self._tensors: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def __call__(self, image: Tensor) -> Tensor:
        """Convert images [B, 3, S, S]."""
        if self.numbers is not None:
            key = image.dtype, image.device
            if key not in self._tensors:
                self._tensors[key] = [
                    torch.tensor(part, dtype=image.dtype)[:, None, None].to(image.device) for part in self.numbers
                ]
            data_mean, data_std, mean, std = self._tensors[key]
            image = (image * data_std + data_mean - mean) / std
        if self.size is not None and self.size != image.shape[-1]:
            image = F.interpolate(image, (self.size, self.size), mode=self.interpolation, antialias=True)
        return image
