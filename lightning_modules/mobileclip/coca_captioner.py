"""open_clip's CoCa as a captioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any

import numpy as np
import torch
from open_clip import CoCa, SimpleTokenizer
from open_clip.transformer import ResidualAttentionBlock, TextTransformer
from PIL import Image
from torch import Tensor

from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, Range
from ..networks.published_clip import load_published
from .caption_decoder import CachedDecoder, draw
from .captioner import Captioner, ExamplePass, check_seeds, post_processed


class CoCaCaptioner(Captioner):
    """A CoCa of open_clip.

    Samples as open_clip's `generate(generation_type="top_p", fixed_output_length=True)` does, but with random numbers
    that depend on the image's seed alone, and so do the captions, up to rounding.

    Args:
        model: a name of open_clip.
        weights: a tag, a file or a folder, as in `load_published`.
        captions: as in `Captioner`.
        top_p: as in `Captioner`.
        temperature: as in `Captioner`.
        length: maximum number of tokens of a caption, including start and end.
        min_length: minimum number of tokens before the end, including the start.
        first_sentence: as in `Captioner`.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        model: str = "coca_ViT-L-14",
        weights: str = "mscoco_finetuned_laion2b_s13b_b90k",
        captions: Annotated[int, COUNT] = 5,
        top_p: Annotated[float, POSITIVE_SHARE] = 0.9,
        temperature: Annotated[float, POSITIVE] = 1.0,
        length: Annotated[int, Range(least=3)] = 30,
        min_length: Annotated[int, NOT_NEGATIVE] = 5,
        first_sentence: bool = True,
    ) -> None:
        super().__init__(captions, top_p, temperature, first_sentence)
        if min_length >= length:
            raise UserError(
                f"Expected captioner.min_length below captioner.length {length}, got {min_length}: decrease it."
            )
        self.model = model
        self.weights = weights
        self.length = length
        self.min_length = min_length

    def load(self) -> None:
        """As in `Captioner`; the network must be a CoCa with open_clip's own text tower."""
        if self.network is not None:
            return
        published = load_published(self.model, self.weights)
        network, tokenizer = published.network, published.tokenizer
        if not _is_supported(network, tokenizer):
            raise UserError(
                "Expected a CoCa whose text tower is open_clip's plain causal transformer, with open_clip's tokenizer, "
                f"got a {type(network).__name__} in {self.weights!r} of {self.model}: give another captioner."
            )
        longest = min(network.text.context_length, network.text_decoder.context_length)
        if self.length > longest:
            raise UserError(f"Expected a length of at most {longest}, the context of {self.model}, got {self.length}.")
        self._tokenizer: SimpleTokenizer = tokenizer
        self._transform = published.preprocessing.transform()
        self.origin = {
            "model": published.model,
            "weights": published.weights,
            "sha256": published.sha256,
            "preprocessing": published.preprocessing.as_dict(),
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

        Token t of caption k of an image is drawn with the random number [k, t] of
        `numpy.random.default_rng(seed).random((n, length))`.

        Args:
            images: [N, 3, H, W].
            seeds: seed of each image.

        Returns:
            Long [N, n, L], L at most `length`: start, text, end, padding. A drawn padding token ends a caption too.

        Raises:
            UserError: If the numbers of seeds and images differ, or the network's logits are non-finite.
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
            if tokens.amax() >= logits.shape[-1]:  # `draw` found no token
                raise UserError(
                    f"Expected finite logits from {self.model}, got non-finite ones: check weights={self.weights!r}, "
                    "and use a wider --trainer.precision."
                )
        drawn.append(torch.full_like(tokens, end).masked_fill(finished, padding))
        return torch.stack(drawn, -1)

    def _text(self, ids: list[int]) -> str:
        # The padding id is also that of a character, which decoding would repeat.
        stops = self._tokenizer.eot_token_id, self.loaded().pad_id
        text = self._tokenizer.decode(list(takewhile(lambda token: token not in stops, ids)))
        return post_processed(text, self.first_sentence)

    def description(self) -> dict[str, Any]:
        """As in `Captioner`."""
        return super().description() | {"length": self.length, "min_length": self.min_length}

    def example_pass(self, rows: int, dtype: torch.dtype) -> ExamplePass:
        """As in `Captioner`."""
        network: Any = self.loaded()
        side = self.origin["preprocessing"]["image_size"]
        drawn = self.length - 2  # all but start and end

        def encode(images: Tensor) -> Tensor:
            tokens: Tensor = network.visual(images)[1]
            return tokens

        def decode(image_tokens: Tensor) -> None:
            decoder = CachedDecoder(network, image_tokens)
            for _ in range(drawn):
                decoder.step(torch.zeros(rows, self.captions, dtype=torch.long))

        towers = (network.text, network.text_decoder)
        weights = sum(tensor.nbytes for tower in towers for tensor in (*tower.parameters(), *tower.buffers()))
        return ExamplePass(torch.zeros(rows, 3, side, side, dtype=dtype), encode, decode, drawn * weights)


def _is_supported(network: Any, tokenizer: Any) -> bool:
    """Return whether `CachedDecoder` computes the same logits as the network."""
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
