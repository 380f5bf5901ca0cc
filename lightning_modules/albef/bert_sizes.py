"""Sizes of the text encoder that follow from the folder of a BERT."""

import json
from dataclasses import fields
from pathlib import Path

from transformers import AutoTokenizer, BertConfig

from ...common.errors import UserError
from .settings import TextSettings

_NAMES = {
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
}
"""Settings by the names that `config.json` has for them."""
_DEFAULTS = {field.name: field.default for field in fields(TextSettings)}


def sizes_of(text: TextSettings) -> dict[str, int]:
    """Return the settings that follow from the BERT whose folder `weights` names; none for other weights.

    Width, heads, feed-forward width, positions and vocabulary are those of `config.json`, special token ids those of
    the folder's tokenizer. Its layers are split: `depth` is what `fusion_depth` leaves, which is half of the layers
    unless it is set. With a `depth` of one's own, the first `depth + fusion_depth` layers are used. A setting counts as
    set if it differs from its default.

    Raises:
        UserError: If the folder holds no BERT, or a setting does not fit it.
    """
    folder = Path(text.weights or "").expanduser()
    if text.weights is None or not folder.is_dir():
        return {}
    config = _read(folder)
    sizes = {name: getattr(config, bert_name) for name, bert_name in _NAMES.items()}
    for name, size in sizes.items():
        given = getattr(text, name)
        # The command line sets the vocabulary from the data, whose tokenizer may have fewer entries.
        if name != "vocab_size" and given not in (_DEFAULTS[name], size):
            raise UserError(
                f"Expected text.{name} {size}, that of the BERT in {str(folder)!r}, got {given}: leave it out."
            )
    return sizes | _split(text, config.num_hidden_layers, folder) | _special_ids(text, folder)


def _read(folder: Path) -> BertConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"Expected a BERT as text.weights, got {str(folder)!r} without config.json: correct it.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Expected JSON in {str(file)!r}, got another format or a damaged file: correct it.") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != "bert":
        raise UserError(f"Expected a BERT as text.weights, got {kind!r} in {str(file)!r}: give another folder.")
    return BertConfig.from_dict(content)


def _split(text: TextSettings, layers: int, folder: Path) -> dict[str, int]:
    """Return the numbers of text and fusion layers."""
    depth, fusion_depth = text.depth, text.fusion_depth
    if depth != _DEFAULTS["depth"]:
        if depth + fusion_depth > layers:
            raise UserError(
                f"Expected text.depth and text.fusion_depth of at most {layers} together, the layers of the BERT in "
                f"{str(folder)!r}, got {depth} and {fusion_depth}: decrease one of them."
            )
        return {}
    if fusion_depth == _DEFAULTS["fusion_depth"]:
        fusion_depth = layers // 2
    if not 1 <= fusion_depth < layers:
        raise UserError(
            f"Expected text.fusion_depth from 1 to {layers - 1}, below the layers of the BERT in {str(folder)!r}, got "
            f"{fusion_depth}: correct it, or give a deeper BERT."
        )
    return {"depth": layers - fusion_depth, "fusion_depth": fusion_depth}


def _special_ids(text: TextSettings, folder: Path) -> dict[str, int]:
    """Return the special token ids of the folder's tokenizer; none without a tokenizer."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in text.special_token_ids}
    return {name: number for name, number in ids.items() if number is not None}
