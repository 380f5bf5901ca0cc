"""Image-to-text models of the transformers library as captioners."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE
from ..core.frozen import Frozen
from .captioner import Captioner, check_seeds, post_processed


class TransformersCaptioner(Captioner):
    """An image-to-text model that needs no prompt, such as BLIP, GIT or an encoder-decoder.

    The captions of an image depend on the seeds of all images of the batch.

    Args:
        model: a name on the hub, or a folder with the network, its tokenizer and its image processor.
        captions: as in `Captioner`.
        top_p: as in `Captioner`.
        temperature: as in `Captioner`.
        max_new_tokens: maximum number of tokens of a caption.
        min_new_tokens: minimum number of tokens of a caption.
        first_sentence: as in `Captioner`.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        model: str,
        captions: Annotated[int, COUNT] = 5,
        top_p: Annotated[float, POSITIVE_SHARE] = 0.9,
        temperature: Annotated[float, POSITIVE] = 1.0,
        max_new_tokens: Annotated[int, COUNT] = 30,
        min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0,
        first_sentence: bool = True,
    ) -> None:
        super().__init__(captions, top_p, temperature, first_sentence)
        if min_new_tokens > max_new_tokens:
            raise UserError(
                f"Expected captioner.min_new_tokens of at most captioner.max_new_tokens {max_new_tokens}, got "
                f"{min_new_tokens}: decrease it."
            )
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens

    def load(self) -> None:
        """As in `Captioner`."""
        if self.network is not None:
            return
        try:
            # By default transformers asks at the terminal whether to run the Python files of a model.
            options: dict[str, Any] = {"trust_remote_code": False}
            network = AutoModelForImageTextToText.from_pretrained(self.model, dtype=torch.float32, **options)
            self._tokenizer = AutoTokenizer.from_pretrained(self.model, **options)
            self._processor = AutoImageProcessor.from_pretrained(self.model, **options)
        except OSError as error:
            raise UserError(
                "Expected a name on the hub, or a folder with a network, its tokenizer and its image processor, found "
                f"no captioner {self.model!r}: correct the name, or download it."
            ) from error
        except ValueError as error:
            raise UserError(
                "Expected an image-to-text model of the transformers library with its tokenizer and its image "
                f"processor, found something else in {self.model!r}: give another model."
            ) from error
        self.origin = {"model": self.model, "weights": self.model, "sha256": Frozen(network).fingerprint()}
        self.network = network

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """As in `Captioner`."""
        self.loaded()
        return partial(_pixels, self._processor)

    @torch.no_grad()
    def forward(self, images: Tensor, seeds: Sequence[int]) -> list[list[str]]:
        """As in `Captioner`."""
        network: Any = self.loaded()
        check_seeds(images, seeds)
        digest = hashlib.sha256(",".join(map(str, seeds)).encode()).digest()
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            ids = network.generate(
                pixel_values=images,
                do_sample=True,
                num_beams=1,
                top_k=0,  # off; its default keeps 50 tokens
                top_p=self.top_p,
                temperature=self.temperature,
                num_return_sequences=self.captions,
                max_new_tokens=self.max_new_tokens,
                min_new_tokens=self.min_new_tokens,
            )
        decoded = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts = [post_processed(text, self.first_sentence) for text in decoded]
        return [texts[first : first + self.captions] for first in range(0, len(texts), self.captions)]

    def description(self) -> dict[str, Any]:
        """As in `Captioner`."""
        lengths = {"max_new_tokens": self.max_new_tokens, "min_new_tokens": self.min_new_tokens}
        return super().description() | lengths


def _pixels(processor: Any, image: Image.Image) -> Tensor:
    """Return the output of an image processor, float [3, H, W]."""
    return processor(images=image, return_tensors="pt")["pixel_values"][0]
