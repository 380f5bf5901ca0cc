"""Initial weights of ALBEF's text and fusion encoder from a public BERT (section 3.1 of the paper)."""

from transformers import BertForMaskedLM

from ..base.fitting import load_fitting
from .network import FusionBert


def load_text_weights(encoder: FusionBert, source: str) -> str:
    """Fill text layers, fusion layers and language-model head from a BERT; cross-attention stays random.

    Args:
        encoder: the BERT to fill.
        source: hub name or folder of a BERT with a masked-language-model head, for example "bert-base-uncased".

    Returns:
        What was done, for a log line.

    Raises:
        ValueError: if the source is no BERT of this size; the sentence lists the keys that do not fit.
    """
    state = BertForMaskedLM.from_pretrained(source).state_dict()
    own = encoder.state_dict()
    kept = {key: value for key, value in own.items() if ".crossattention." in key}
    # A BERT deeper than ours gives its lower layers to the text encoder and its next ones to fusion.
    surplus = [key for key in state if _layer_of(key) >= len(encoder.layers)]
    state = {key: value for key, value in state.items() if key not in surplus}
    load_fitting(encoder, state | kept, f"the text encoder from {source!r}")
    return f"text and fusion encoder from {source!r}, cross-attention random"


def _layer_of(key: str) -> int:
    parts = key.split(".")
    return int(parts[parts.index("layer") + 1]) if "layer" in parts else -1
