"""Vocabularies of text towers: their sizes, which shrink to the tokenizer that a run trains, and trained ones."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning import LightningModule
from torch.distributed.tensor import DTensor

from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...common.errors import UserError
from ...common.tokenizers import open_tokenizer
from ..core.trainers import datamodule_of

_WORDS = "embeddings.word_embeddings.weight"


class TextTower(Protocol):
    """A network with word embeddings."""

    def resize_vocabulary(self, entries: int) -> None:
        """Keep the embeddings of the first `entries` words."""


def restored_vocabulary(module: LightningModule, checkpoint: Mapping[str, Any], built: int) -> int | None:
    """Return the vocabulary size of a restored checkpoint; None to keep the module's.

    A trained tokenizer may have fewer entries than the setting `text.vocab_size`.

    Args:
        module: module that is restored.
        checkpoint: checkpoint of a training.
        built: vocabulary size that the module was built for.
    """
    entries = ((checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY) or {}).get("text") or {}).get("vocab_size")
    # Sharded towers keep their size; weights that do not fit are reported when they are loaded.
    if not isinstance(entries, int) or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return None
    return entries if entries == built or (entries < built and _trained(checkpoint)) else None


def vocabulary_of(source: str) -> int | None:
    """Return the vocabulary size of trained weights; None if it cannot be read: an error is reported on load.

    Args:
        source: checkpoint, a file or folder, of this package or of ALBEF's authors, or the folder of an export.
    """
    path = Path(source).expanduser()
    try:
        if (path / "config.json").is_file():
            arguments = json.loads((path / "config.json").read_text(encoding="utf-8"))["arguments"]
            return _number(arguments["text"]["vocab_size"])
        # With `mmap` the tensors are not read.
        content = torch.load(path / METADATA if path.is_dir() else path, "cpu", weights_only=True, mmap=True)
        if "hyper_parameters" in content:
            return _number(content["hyper_parameters"]["text"]["vocab_size"])
        state = content.get("state_dict", content.get("model", content))
        return next((len(tensor) for name, tensor in state.items() if name.endswith(_WORDS)), None)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, pickle.UnpicklingError):
        return None


def check_tokenizer(module: LightningModule, name: str, entries: int, padding: int, trained: bool) -> None:
    """Compare the tokenizer of a run's data with that of a text encoder of transformers.

    Args:
        module: the module with the encoder.
        name: folder or hub name of the encoder's tokenizer.
        entries: entries of the encoder's vocabulary.
        padding: id of the token that it does not attend to.
        trained: whether the encoder has trained weights; the words of a local folder are then compared too.

    Raises:
        UserError: If the data's tokenizer has other ids.
    """
    tokenizer = getattr(datamodule_of(module), "tokenizer", None)
    if tokenizer is None:
        return
    padding_id = getattr(tokenizer, "pad_token_id", None)
    padding_id = getattr(tokenizer, "eos_token_id", None) if padding_id is None else padding_id
    if padding_id != padding or len(tokenizer) > entries:
        raise UserError(
            f"Expected the tokenizer of the text tower {name!r}, with at most {entries} entries and the padding id "
            f"{padding}, got one with {len(tokenizer)} entries and the padding id {padding_id}: leave data.tokenizer "
            "out, which then is the tower's own."
        )
    expected = _words_of(name) if trained else {}
    words = tokenizer.get_vocab() if expected else {}
    other = next((word for word, number in expected.items() if words.get(word) != number), None)
    if other is not None:
        raise UserError(
            f"Expected the tokenizer of the text tower {name!r}, got one with another id for {other!r}: leave "
            "data.tokenizer out, which then is the tower's own."
        )


def _words_of(name: str) -> dict[str, int]:
    """Return the ids of the words of a tokenizer in a local file or folder; none without one."""
    if not Path(name).expanduser().exists():  # of the hub, or removed since the encoder's checkpoint was written
        return {}
    try:
        words: dict[str, int] = open_tokenizer(name).get_vocab()
    except UserError:  # a folder of the encoder alone
        return {}
    return words


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _trained(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the data of a checkpoint had a trained tokenizer, which is in the datamodule's state."""
    # Lightning stores that state under the name of the datamodule's class.
    states = [state for name, state in checkpoint.items() if not name.endswith("hyper_parameters")]
    return any(isinstance(state, Mapping) and isinstance(state.get("tokenizer"), str) for state in states)
