"""Captioners, which describe an image in several sampled sentences; and open_clip's CoCa as one of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from open_clip import CoCa, SimpleTokenizer
from open_clip.transformer import ResidualAttentionBlock, TextTransformer
from PIL import Image
from torch import Tensor, nn

from ..networks.published_clip import load_outside
from .caption_decoder import CachedDecoder

_LIKELY = 1024
"""Tokens among which those to draw from are looked for first: to sort all 49,408 would take most of the time."""


class Captioner(nn.Module, ABC):
    """A trained network that describes images, always in eval mode.

    The constructor only checks its arguments, so that a configuration can be read without the weights.

    Args:
        captions: drawn of each image.
        top_p: only the likeliest tokens that together have this probability are drawn from, in (0, 1].
        temperature: what the logits of those are divided by.
        first_sentence: cut a caption at its first full stop.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(self, captions: int, top_p: float, temperature: float, first_sentence: bool) -> None:
        super().__init__()
        if captions < 1:
            raise ValueError(f"Found captions={captions}, expected a number from 1 on.")
        if not 0 < top_p <= 1:
            raise ValueError(f"Found top_p={top_p}, expected a probability above 0 and up to 1.")
        if not 0 < temperature < float("inf"):
            raise ValueError(f"Found temperature={temperature}, expected a number above 0.")
        self.captions = captions
        self.top_p = top_p
        self.temperature = temperature
        self.first_sentence = first_sentence
        self.network: nn.Module | None = None
        self.origin: dict[str, Any] = {}

    @abstractmethod
    def load(self) -> None:
        """Load the weights, on the first call.

        Raises:
            FileNotFoundError: if they are not there.
            ValueError: if they are of no network that this captioner can use.
            RuntimeError: if they cannot be read or downloaded.
        """

    @property
    @abstractmethod
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """What turns an RGB image into the network's input, float [3, H, W]; it can be pickled."""

    @abstractmethod
    def forward(self, images: Tensor, seeds: Sequence[int]) -> list[list[str]]:
        """Describe images.

        Args:
            images: what `transform` made of them, [N, 3, H, W].
            seeds: one for each image, which fix the draws.

        Returns:
            The captions of each image, some of which may be empty.

        Raises:
            ValueError: if there are not as many seeds as images.
        """

    def description(self) -> dict[str, Any]:
        """What the captions are of, to be written as JSON: the network, its weights, how tokens are drawn."""
        return {
            "class": type(self).__name__,
            **self.origin,
            "captions": self.captions,
            "top_p": self.top_p,
            "temperature": self.temperature,
            "first_sentence": self.first_sentence,
        }

    def train(self, mode: bool = True) -> "Captioner":
        """Stay in eval mode."""
        return super().train(False)

    def loaded(self) -> nn.Module:
        """The network.

        Raises:
            RuntimeError: if `load` was not called.
        """
        if self.network is None:
            raise RuntimeError(f"Found a {type(self).__name__} without weights: call its load() first.")
        return self.network


class CoCaCaptioner(Captioner):
    """A CoCa of open_clip.

    Draws as open_clip's `generate(generation_type="top_p", fixed_output_length=True)` does, with other random numbers:
    the caption of an image depends on the image and its seed alone, up to rounding.

    Args:
        model: a name of open_clip's.
        weights: a tag, a file or a folder, as in `load_outside`.
        captions: as in `Captioner`.
        top_p: as in `Captioner`.
        temperature: as in `Captioner`.
        length: tokens of a caption at most, with the two that mark its start and its end.
        min_length: tokens that come before the end at least, with the one that marks the start.
        first_sentence: as in `Captioner`.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        model: str = "coca_ViT-L-14",
        weights: str = "mscoco_finetuned_laion2b_s13b_b90k",
        captions: int = 5,
        top_p: float = 0.9,
        temperature: float = 1.0,
        length: int = 30,
        min_length: int = 5,
        first_sentence: bool = True,
    ) -> None:
        super().__init__(captions, top_p, temperature, first_sentence)
        if length < 3:
            raise ValueError(f"Found length={length}, expected 3 or more: it counts the start and the end.")
        if not 0 <= min_length < length:
            raise ValueError(f"Found min_length={min_length}, expected a number from 0 to below length={length}.")
        self.model = model
        self.weights = weights
        self.length = length
        self.min_length = min_length

    def load(self) -> None:
        """As in `Captioner`; the network must be a CoCa with open_clip's own text tower."""
        if self.network is not None:
            return
        outside = load_outside(self.model, self.weights)
        network, tokenizer = outside.network, outside.tokenizer
        if not _is_supported(network, tokenizer):
            raise ValueError(
                f"Found a {type(network).__name__} in {self.weights!r} of {self.model}, expected a CoCa whose text "
                "tower is open_clip's plain causal transformer, with its own tokenizer: give another captioner."
            )
        longest = min(network.text.context_length, network.text_decoder.context_length)
        if self.length > longest:
            raise ValueError(f"Found length={self.length}, expected {longest} or less, which is what {self.model} has.")
        self._tokenizer: SimpleTokenizer = tokenizer
        self._transform = outside.preprocessing.transform()
        # Lists, as JSON gives them back.
        preprocessing = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(outside.preprocessing).items()
        }
        self.origin = {
            "model": outside.model,
            "weights": outside.weights,
            "sha256": outside.sha256,
            "preprocessing": preprocessing,
        }
        self.network = network

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """As in `Captioner`."""
        self.loaded()
        return self._transform

    def forward(self, images: Tensor, seeds: Sequence[int]) -> list[list[str]]:
        """As in `Captioner`."""
        return [[self._text(row) for row in rows] for rows in self.sample(images, seeds).tolist()]

    @torch.no_grad()
    def sample(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """Draw token ids.

        Caption k of an image has its token at position t by the random number [k, t] of
        `numpy.random.default_rng(seed).random((n, length))`.

        Args:
            images: [N, 3, H, W].
            seeds: one for each image.

        Returns:
            Long [N, n, L], L at most `length`: the start, the words, the end, padding. A drawn padding token ends a
            caption too.

        Raises:
            ValueError: if there are not as many seeds as images.
            FloatingPointError: if the network's logits are non-finite.
        """
        network: Any = self.loaded()
        check_seeds(images, seeds)
        numbers = np.stack([np.random.default_rng(seed).random((self.captions, self.length)) for seed in seeds])
        uniform = torch.from_numpy(numbers).to(images.device)
        start, end, padding = self._tokenizer.sot_token_id, self._tokenizer.eot_token_id, network.pad_id
        decoder = CachedDecoder(network, network.visual(images)[1])
        tokens = torch.full(uniform.shape[:2], start, device=images.device)
        finished = torch.zeros_like(tokens, dtype=torch.bool)
        drawn = [tokens]
        for position in range(1, self.length - 1):
            logits = decoder.step(tokens)
            if position < self.min_length:
                logits[..., end] = -torch.inf
            tokens = draw(logits, uniform[..., position], self.top_p, self.temperature)
            tokens = tokens.masked_fill(finished, padding)
            finished = finished | (tokens == end) | (tokens == padding)
            drawn.append(tokens)
            if finished.all():
                break
            if tokens.amax() >= logits.shape[-1]:  # where `draw` finds no token
                raise FloatingPointError(
                    f"Expected finite logits from {self.model}, got non-finite ones: check weights={self.weights!r}, "
                    "and use a wider --trainer.precision."
                )
        drawn.append(torch.full_like(tokens, end).masked_fill(finished, padding))
        return torch.stack(drawn, -1)

    def _text(self, ids: list[int]) -> str:
        # Padding is the id of a character too, so open_clip ends a text with many of them.
        stops = self._tokenizer.eot_token_id, self.loaded().pad_id
        text = self._tokenizer.decode(list(takewhile(lambda token: token not in stops, ids)))
        return post_processed(text, self.first_sentence)

    def description(self) -> dict[str, Any]:
        """As in `Captioner`."""
        return super().description() | {"length": self.length, "min_length": self.min_length}


def draw(logits: Tensor, uniform: Tensor, top_p: float, temperature: float) -> Tensor:
    """Draw tokens by the inverse of their distribution function, which does not change where logits hardly do.

    Args:
        logits: [..., V].
        uniform: float64 numbers in [0, 1), [...].
        top_p: as in `Captioner`.
        temperature: as in `Captioner`.

    Returns:
        Ids, long [...].
    """
    probabilities = (top_p_filtered(logits, top_p) / temperature).softmax(-1, dtype=torch.float64)
    distribution = probabilities.cumsum(-1)
    # From above 0 to the last sum, which need not be 1: a token without probability is never at one of these.
    target = (1 - uniform)[..., None] * distribution[..., -1:]
    return torch.searchsorted(distribution, target)[..., 0]


def top_p_filtered(logits: Tensor, top_p: float) -> Tensor:
    """Logits [..., V] with -inf for all tokens but the likeliest that together have the probability `top_p`."""
    if logits.shape[-1] > _LIKELY:
        largest, places = logits.topk(_LIKELY)
        probabilities = (largest.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
        likelier = probabilities.cumsum(-1) - probabilities
        if bool((likelier[..., -1] >= top_p).all()):  # so that nothing beyond these is kept
            kept = largest.masked_fill(likelier >= top_p, -torch.inf)
            return torch.full_like(logits, -torch.inf).scatter(-1, places, kept)
    ascending, order = logits.sort(dim=-1, stable=True)
    dropped = ascending.softmax(-1, dtype=torch.float64).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def post_processed(text: str, first_sentence: bool = True) -> str:
    """What lies between a decoded text's last start and its first end, without blanks around it.

    Args:
        text: as the tokenizer decodes it.
        first_sentence: cut it at the first full stop.
    """
    text = text.partition("<end_of_text>")[0].rpartition("<start_of_text>")[2]
    return (text.partition(".")[0] if first_sentence else text).strip()


def check_seeds(images: Tensor, seeds: Sequence[int]) -> None:
    """Check that every image has a seed.

    Raises:
        ValueError: if not.
    """
    if len(seeds) != len(images):
        raise ValueError(f"Found {len(seeds)} seeds for {len(images)} images, expected one for each.")


def _is_supported(network: Any, tokenizer: Any) -> bool:
    """Whether `CachedDecoder` computes what the network does."""
    text = getattr(network, "text", None)
    return (
        isinstance(network, CoCa)
        and isinstance(text, TextTransformer)
        and isinstance(tokenizer, SimpleTokenizer)
        and text.vocab_size == tokenizer.vocab_size
        and text.attn_mask is not None  # causal
        and text.pad_id == network.pad_id  # so that no token of a caption is masked
        and getattr(network.visual, "output_tokens", False)
        and all(isinstance(block, ResidualAttentionBlock) for block in text.transformer.resblocks)
    )
