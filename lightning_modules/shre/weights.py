"""Initial weights of SHRe's text encoder from a public BERT."""

import re

from transformers import BertModel

from ..base.fitting import load_fitting
from .network import TextEncoder


def load_text_weights(encoder: TextEncoder, source: str) -> str:
    """Fill embeddings and layers from the first layers of a BERT.

    Args:
        encoder: what to fill.
        source: hub name or folder of a BERT, for example "bert-base-uncased" (the origin's).

    Returns:
        What was done, for a log line.

    Raises:
        ValueError: if the source is no BERT of this size; the sentence lists the keys that do not fit.
    """
    state = BertModel.from_pretrained(source, add_pooling_layer=False).state_dict()
    layers = len(encoder.encoder["layer"])
    state = {key: value for key, value in state.items() if _layer_of(key) < layers}
    load_fitting(encoder, state, f"the text encoder from {source!r}")
    return f"text encoder from {source!r}, its first {layers} layers"


def _layer_of(key: str) -> int:
    found = re.match(r"encoder\.layer\.(\d+)\.", key)
    return int(found[1]) if found else -1
