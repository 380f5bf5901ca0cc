"""Initial weights of SHRe's encoders from public models."""

import re

from lightning.pytorch.utilities import rank_zero_info
from transformers import BertModel

from ..core.fitting import load_fitting
from ..networks.vit import load_vision_weights
from .network import SHReNetwork, TextEncoder


def load_encoders(network: SHReNetwork, vision: str | None, text: str | None) -> None:
    """Load the encoders' weights, and log their sources.

    Args:
        network: network to fill.
        vision: timm model or file for the image encoder; None: random.
        text: hub name or folder of a BERT for the text encoder; None: random.
    """
    done = ["image encoder random", "text encoder random"]
    if vision is not None:
        done[0] = load_vision_weights(network.image_encoder, vision, first_blocks=True)
    if text is not None:
        done[1] = load_text_weights(network.text_encoder, text)
    rank_zero_info(f"Initial weights: {done[0]}; {done[1]}; shared encoder random.")


def load_text_weights(encoder: TextEncoder, source: str) -> str:
    """Load embeddings and layers from the first layers of a BERT.

    Args:
        encoder: text encoder to fill.
        source: hub name or folder of a BERT, for example "bert-base-uncased" (the thesis').

    Returns:
        Description of the source, for a log line.

    Raises:
        UserError: If the source is not a BERT of this size; the message lists the keys that do not fit.
    """
    state = BertModel.from_pretrained(source, add_pooling_layer=False).state_dict()
    layers = len(encoder.encoder["layer"])
    state = {key: value for key, value in state.items() if _layer_of(key) < layers}
    load_fitting(encoder, state, f"the text encoder from {source!r}")
    return f"text encoder from {source!r}, its first {layers} layers"


def _layer_of(key: str) -> int:
    found = re.match(r"encoder\.layer\.(\d+)\.", key)
    return int(found[1]) if found else -1
