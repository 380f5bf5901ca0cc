"""The tokenizer of a checkpoint's datamodule."""

from collections.abc import Mapping
from typing import Any

from ...common.errors import UserError
from .tokenizers import open_tokenizer, set_ending, tokenizer_from_json


def saved_tokenizer(content: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the tokenizer of a checkpoint's data as JSON text, with the ending of its texts, and a note on it.

    Args:
        content: The checkpoint.
    """
    data = content.get("datamodule_hyper_parameters") or {}
    # Lightning keeps the datamodule's state under the name of its class, of whatever name.
    states = [state for name, state in content.items() if not name.endswith("hyper_parameters")]
    texts = [state.get("tokenizer") for state in states if isinstance(state, Mapping)]
    trained = next((text for text in texts if isinstance(text, str)), None)
    try:
        if trained is not None:
            tokenizer = tokenizer_from_json(trained)
        elif data.get("tokenizer") is not None:
            tokenizer = open_tokenizer(data["tokenizer"])
        else:
            return None, "without a tokenizer, since the checkpoint names none"
    except (UserError, ValueError) as error:
        return None, f"without its tokenizer ({error})"
    set_ending(tokenizer, data.get("append_sep", True))
    return tokenizer.backend_tokenizer.to_str(), "with its tokenizer"
