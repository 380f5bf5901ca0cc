"""Tokenizer of the datamodule in a checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...common.clip_vocabulary import clip_tokenizer_json
from ...common.errors import UserError
from .clip import CLIP
from .tokenizers import open_tokenizer, set_ending, tokenizer_from_json


def trained_tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return the tokenizer that a run trained, from the datamodule's state in the checkpoint.

    Args:
        content: the checkpoint.

    Returns:
        The tokenizer as JSON text; None if the run trained no tokenizer.
    """
    # Lightning stores the state of the datamodule under the name of its class, which may be any name.
    states = [state for name, state in content.items() if not name.endswith("hyper_parameters")]
    texts = [state.get("tokenizer") for state in states if isinstance(state, Mapping)]
    return next((text for text in texts if isinstance(text, str)), None)


def tokenizer_in_checkpoint(path: str | os.PathLike[str] | None) -> str | None:
    """Return the tokenizer that the run of a checkpoint trained, as JSON text; None if it trained none.

    Lightning restores the state of a datamodule only if its class is the same, but a model needs the token ids that it
    was trained with, also with another datamodule.

    Args:
        path: path of the checkpoint; None without one.
    """
    file = Path(path or "")
    if file.is_dir():
        file = file / "meta.pt"  # of a sharded checkpoint
    if not file.is_file():
        return None
    return trained_tokenizer(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def saved_tokenizer(content: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the tokenizer of the datamodule in a checkpoint, for an export.

    Args:
        content: the checkpoint.

    Returns:
        The tokenizer as JSON text, with the template that ends texts; None if there is no readable tokenizer. And a
        phrase about the tokenizer for the message of the export.
    """
    data = content.get("datamodule_hyper_parameters") or {}
    trained = trained_tokenizer(content)
    try:
        if trained is not None:
            tokenizer = tokenizer_from_json(trained)
        elif data.get("tokenizer") == CLIP:
            return clip_tokenizer_json(), "with its tokenizer"
        elif data.get("tokenizer") is not None:
            tokenizer = open_tokenizer(data["tokenizer"])
        else:
            return None, "without a tokenizer, since the checkpoint names none"
    except (UserError, ValueError) as error:
        return None, f"without its tokenizer ({error})"
    set_ending(tokenizer, data.get("append_sep", True))
    return tokenizer.backend_tokenizer.to_str(), "with its tokenizer"
