"""What `python -m vlightning.export` writes of an ALBEF checkpoint: the module, and the tokenizer of its data."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..datamodules.text.tokenizers import open_tokenizer, set_ending, tokenizer_from_json
from ..lightning_modules.albef import export as albef_export

LAYOUTS = albef_export.LAYOUTS


def tokenizer_of(content: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the tokenizer of a checkpoint's data as JSON text, with the ending of its texts, and a note on it."""
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
    except ValueError as error:
        return None, f"without its tokenizer ({error})"
    set_ending(tokenizer, data.get("append_sep", True))
    return tokenizer.backend_tokenizer.to_str(), "with its tokenizer"


export = partial(albef_export.export, tokenizer_of=tokenizer_of)
