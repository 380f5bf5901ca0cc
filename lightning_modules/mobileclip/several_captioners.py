"""Several captioners, each of which describes every image."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from .captioner import Captioner


class SeveralCaptioners(nn.Module):
    """Captioners whose captions of an image are concatenated in their order, as MobileCLIP2 combines them.

    Args:
        captioners: at least one.
    """

    def __init__(self, captioners: Sequence[Captioner]) -> None:
        super().__init__()
        self.captioners = list(captioners)
        self.networks = nn.ModuleList(captioners)
        self.captions = sum(one.captions for one in captioners)

    def load(self) -> None:
        """Load the weights of all on the first call; as in `Captioner`."""
        for one in self.captioners:
            one.load()

    @property
    def transform(self) -> Callable[[Image.Image], list[Tensor]]:
        """Transform from an RGB image to the inputs of all, each float [3, H, W]; can be pickled."""
        return _Transforms([one.transform for one in self.captioners])

    def forward(self, images: Sequence[Tensor], seeds: Sequence[int]) -> list[list[str]]:
        """Describe images.

        Args:
            images: batches of the outputs of `transform`, [N, 3, H, W] for each captioner.
            seeds: seed of each image; captioners after the first get seeds derived from it, since equal random numbers
                would make networks of one kind draw alike.

        Returns:
            The captions of each image.
        """
        made = [
            one(batch, seeds if place == 0 else [_derived(seed, place) for seed in seeds])
            for place, (one, batch) in enumerate(zip(self.captioners, images, strict=True))
        ]
        return [[text for texts in of_image for text in texts] for of_image in zip(*made, strict=True)]

    def description(self) -> list[dict[str, Any]]:
        """Return the descriptions of all in their order, as data for JSON."""
        return [one.description() for one in self.captioners]


@dataclass
class _Transforms:
    """Several transforms of one image."""

    transforms: list[Callable[[Image.Image], Tensor]]

    def __call__(self, image: Image.Image) -> list[Tensor]:
        return [transform(image) for transform in self.transforms]


def _derived(seed: int, place: int) -> int:
    return int(np.random.SeedSequence((seed, place)).generate_state(1)[0])
