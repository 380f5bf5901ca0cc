"""Captioners, which describe an image in several sampled sentences: their base class, and several of them together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.ranges import CheckedArguments


@dataclass(frozen=True)
class ExamplePass:
    """The passes of a captioner over a batch, from which `vlightning plan` computes memory and time.

    Attributes:
        images: inputs of the network, [N, 3, H, W].
        encode: images to image tokens.
        decode: draws all tokens of the captions, of any values, from image tokens.
        bytes_read: weights that `decode` reads, once for each token, in bytes.
    """

    images: Tensor
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], None]
    bytes_read: int


class Captioner(CheckedArguments, nn.Module, ABC, option="captioner"):
    """A trained network that describes images, always in eval mode.

    The constructor only checks its arguments; `load` loads the weights.

    Args:
        captions: number of captions sampled for each image.
        top_p: probability mass, in (0, 1], of the most likely tokens that nucleus sampling draws from.
        temperature: divisor of their logits.
        first_sentence: whether to cut a caption at its first full stop.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(self, captions: int, top_p: float, temperature: float, first_sentence: bool) -> None:
        super().__init__()
        self.captions = captions
        self.top_p = top_p
        self.temperature = temperature
        self.first_sentence = first_sentence
        self.network: nn.Module | None = None
        self.origin: dict[str, Any] = {}

    @abstractmethod
    def load(self) -> None:
        """Load the weights on the first call.

        Raises:
            UserError: If the weights cannot be found, read or downloaded, or are of a network that is not supported.
        """

    @property
    @abstractmethod
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Transform from an RGB image to the network's input, float [3, H, W]; can be pickled."""

    @abstractmethod
    def forward(self, images: Tensor, seeds: Sequence[int]) -> list[list[str]]:
        """Describe images.

        Args:
            images: outputs of `transform`, [N, 3, H, W].
            seeds: seed of the sampling of each image.

        Returns:
            The captions of each image, some of which may be empty.

        Raises:
            UserError: If the numbers of seeds and images differ.
        """

    def description(self) -> dict[str, Any]:
        """Return the network, its weights and the sampling parameters as data for JSON."""
        return {
            "class": type(self).__name__,
            **self.origin,
            "captions": self.captions,
            "top_p": self.top_p,
            "temperature": self.temperature,
            "first_sentence": self.first_sentence,
        }

    def example_pass(self, rows: int, dtype: torch.dtype) -> ExamplePass:
        """Return the passes over a batch of N images for `vlightning plan`, which plans no captioner without them."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> "Captioner":
        """Stay in eval mode."""
        return super().train(False)

    def loaded(self) -> nn.Module:
        """Return the network.

        Raises:
            RuntimeError: If `load` was not called.
        """
        if self.network is None:
            raise RuntimeError(f"Expected a loaded {type(self).__name__}, got one without weights: call load() first.")
        return self.network


class SeveralCaptioners(nn.Module):
    """Captioners whose captions of an image are concatenated in their order, as MobileCLIP2 combines them.

    Args:
        captioners: at least one.
    """

    def __init__(self, captioners: Sequence[Captioner]) -> None:
        super().__init__()
        self.captioners = list(captioners)
        self.networks = nn.ModuleList(captioners)
        self.captions = sum(captioner.captions for captioner in captioners)

    def load(self) -> None:
        """Load the weights of all on the first call; as in `Captioner`."""
        for captioner in self.captioners:
            captioner.load()

    @property
    def transform(self) -> Callable[[Image.Image], list[Tensor]]:
        """Transform from an RGB image to the inputs of all, each float [3, H, W]; can be pickled."""
        return _Transforms([captioner.transform for captioner in self.captioners])

    def forward(self, images: Sequence[Tensor], seeds: Sequence[int]) -> list[list[str]]:
        """Describe images.

        Args:
            images: batches of the outputs of `transform`, [N, 3, H, W] for each captioner.
            seeds: seed of each image; captioners after the first get seeds derived from it, since equal random numbers
                would make networks of one kind draw alike.

        Returns:
            The captions of each image.
        """
        by_captioner = [
            captioner(batch, seeds if number == 0 else [_derived(seed, number) for seed in seeds])
            for number, (captioner, batch) in enumerate(zip(self.captioners, images, strict=True))
        ]
        return [list(chain.from_iterable(texts)) for texts in zip(*by_captioner, strict=True)]

    def description(self) -> list[dict[str, Any]]:
        """Return the descriptions of all in their order, as data for JSON."""
        return [captioner.description() for captioner in self.captioners]


@dataclass
class _Transforms:
    """Several transforms of one image."""

    transforms: list[Callable[[Image.Image], Tensor]]

    def __call__(self, image: Image.Image) -> list[Tensor]:
        return [transform(image) for transform in self.transforms]


def _derived(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def post_processed(text: str, first_sentence: bool = True) -> str:
    """Return the stripped part of a decoded text between its last start and its first end.

    Args:
        text: decoded tokens.
        first_sentence: whether to cut the text at the first full stop.
    """
    text = text.partition("<end_of_text>")[0].rpartition("<start_of_text>")[2]
    return (text.partition(".")[0] if first_sentence else text).strip()


def check_seeds(images: Tensor, seeds: Sequence[int]) -> None:
    """Check that every image has a seed.

    Raises:
        UserError: If not.
    """
    if len(seeds) != len(images):
        raise UserError(f"Expected a seed for each of {len(images)} images, got {len(seeds)} seeds.")
