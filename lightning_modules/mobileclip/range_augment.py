"""RangeAugment: brightness, contrast and noise of learned strength (Mehta et al., arXiv 2212.10553).

Ranges, starting values, order and loss are those of the authors' released code (CVNets). MobileCLIP augments the
student's images only, towards a PSNR that falls from 40 to 20 dB along a cosine. No more is known of its
settings, which are quoted second-hand; its released code has no RangeAugment.

Shapes: B images, S side of an image in pixels.
"""

import math
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from ...callbacks.draws import chosen_half, draw_normal, draw_number, draw_uniform
from ...common.preprocessing import Normalization
from ..core.precision import at_least_float32
from ..core.trainers import trainer_of
from ..networks.user_teacher import TeacherImages
from ..optim.schedules import steps_of_run

_PIXELS = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_LOWEST = [[0.1, 0.1, 0.0], [1.1, 1.1, 0.0001]]
_HIGHEST = [[0.9, 0.9, 0.00005], [10.0, 10.0, 1.0]]
"""Bounds of the lower (first row) and the upper ends of the ranges: brightness, contrast, deviation of the noise."""
_START = [[0.5, 0.5, 0.0], [1.5, 1.5, 0.1]]
"""Initial parameters, whose sigmoid is the position between these bounds."""
_ORDERS = list(permutations(range(3)))
_WEIGHT = 100 / 255**2
"""Factor of the loss, whose errors are squares of 8-bit values."""


class RangeAugment(nn.Module):
    """Augment images with magnitudes drawn uniformly from ranges whose ends are learned.

    Each operation changes a random half of the images of all processes, in random order. The ends learn from the loss
    of the task, and from a loss that keeps the mean squared error of an augmented image near that of a target PSNR.
    Draws are by (seed, step, position in the global batch).

    Args:
        psnr: target PSNR at the start and at the end of the run in dB, between which the squared error of the target
            follows half a cosine; None changes no image, and has no parameters.
    """

    def __init__(self, psnr: Sequence[float] | None) -> None:
        super().__init__()
        self.psnr = psnr
        self.start(_PIXELS)
        if psnr is not None:
            self.ends = nn.Parameter(torch.tensor(_START).flatten())  # a vector has no weight decay
            self.register_buffer("lowest", torch.tensor(_LOWEST), persistent=False)
            self.register_buffer("highest", torch.tensor(_HIGHEST), persistent=False)

    def start(self, images: Normalization) -> None:
        """Set the normalization of the images."""
        self._to_pixels = TeacherImages(None, images, _PIXELS)
        self._from_pixels = TeacherImages(None, _PIXELS, images)

    def forward(self, image: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        """Augment images.

        Args:
            image: normalized images [B, 3, S, S].
            progress: share of the run that is done, from 0 to 1.

        Returns:
            Normalized images [B, 3, S, S] with gradient, and the loss of their similarity.
        """
        before = self._to_pixels(at_least_float32(image))
        ranges = self.ranges().to(before.dtype)
        after = before
        for number in _ORDERS[draw_number() % len(_ORDERS)]:
            low, high = ranges[:, number]
            chosen = chosen_half(len(image), image.device)[:, None, None, None]
            magnitude = low + (high - low) * draw_uniform(len(image), 1, image.device)[..., None, None].to(before.dtype)
            after = torch.where(chosen, _operate(after, number, magnitude), after)
        after = after.clamp(0, 1)
        error = (255 * (after - before)).square().mean((1, 2, 3))
        loss = _WEIGHT * F.smooth_l1_loss(error, torch.full_like(error, self.target_error(progress)))
        return self._from_pixels(after).to(image.dtype), loss

    def ranges(self) -> Tensor:
        """Return the lower and the upper ends [2, 3] of brightness, contrast and the deviation of the noise."""
        lowest = self.get_buffer("lowest")
        highest = self.get_buffer("highest")
        return lowest + (highest - lowest) * self.ends.view(2, 3).sigmoid()

    def target_error(self, progress: float) -> float:
        """Return the mean squared error, in squares of 8-bit values, of the target PSNR."""
        assert self.psnr is not None
        start, end = (255**2 / 10 ** (psnr / 10) for psnr in self.psnr)
        return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def student_images(augment: RangeAugment, module: LightningModule, image: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the images that the student sees, and the losses of their augmentation: one, or none without it.

    Args:
        augment: the augmentation.
        module: the module, whose trainer knows the length of the run; outside a run, this is its start.
        image: normalized images [B, 3, S, S].
    """
    if augment.psnr is None:
        return image, []
    trainer = trainer_of(module)
    progress = 0.0 if trainer is None else trainer.global_step / steps_of_run(trainer)
    augmented, loss = augment(image, progress)
    return augmented, [loss]


def _operate(image: Tensor, number: int, magnitude: Tensor) -> Tensor:
    if number == 0:  # brightness
        return image * magnitude
    if number == 1:  # contrast
        return torch.lerp(image.mean((2, 3), keepdim=True), image, magnitude)
    noise = draw_normal(len(image), image[0].numel(), image.device)
    return image + magnitude * noise.view_as(image).to(image.dtype)
