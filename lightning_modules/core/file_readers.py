"""Parts of published image-text models."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .clip_preprocessing import Preprocessing

Tokenizer = Callable[[list[str]], Tensor]


class PublishedCLIP(NamedTuple):
    """A trained model: frozen, in eval mode, in float32.

    Attributes:
        network: the model.
        preprocessing: its image preprocessing.
        tokenizer: texts to token ids, long [T, L].
        model: its name.
        weights: the source of its weights.
        sha256: fingerprint of the weights.
    """

    network: Any  # CLIP, CustomTextCLIP or CoCa, which have no common type
    preprocessing: Preprocessing
    tokenizer: Tokenizer
    model: str
    weights: str
    sha256: str


class Loaded(NamedTuple):
    """A network with its preprocessing and its tokenizer."""

    network: nn.Module
    preprocessing: Preprocessing
    tokenizer: Tokenizer
