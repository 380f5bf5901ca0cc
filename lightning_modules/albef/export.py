"""What `vlightning export` writes of an ALBEF checkpoint: the module, and the tokenizer of its data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...datamodules.text.tokenizers import open_tokenizer, set_ending, tokenizer_from_json
from ..base.preprocessing import recorded_preprocessing, said
from .checkpoint import save_official
from .module import ALBEFModule
from .pretrained import arguments_without_weights, rebuild

LAYOUTS = {
    "vlightning": "a folder with model.safetensors, config.json and the tokenizer",
    "albef": "a .pth file in the authors' layout, that of pre-training if the model has a language-model head, else "
    "that of retrieval",
}
"""What each layout is; the first is the default."""


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the model of a checkpoint.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.
        target: what to write; there is nothing of that name, or an empty folder.
        layout: one of `LAYOUTS`.

    Returns:
        What was written.

    Raises:
        FileExistsError: if the target is a folder where a file is to be.
        ValueError: if the checkpoint does not fit ALBEFModule.
    """
    arguments = arguments_without_weights(content["hyper_parameters"])
    module = rebuild(ALBEFModule, arguments, content["state_dict"], source)
    look = recorded_preprocessing(content)
    module.adopt_preprocessing(look)
    if layout == "albef":
        if Path(target).is_dir():
            raise FileExistsError(f"Found a folder {target!r}, expected the name of a new file, such as albef.pth.")
        save_official(module, target)
        family = "pre-training" if module.hparams["mlm"] else "retrieval"
        return f"Wrote {target} in the authors' {family} layout; {said(look)}."
    tokenizer, note = _tokenizer(content)
    module.save_pretrained(target, tokenizer)
    return f"Wrote {target} {note}; ALBEFModule.from_pretrained({target!r}) reads it; {said(look)}."


def _tokenizer(content: Mapping[str, Any]) -> tuple[str | None, str]:
    """JSON text of the tokenizer of the data, with the ending that its texts had, and what to say about it."""
    data = content.get("datamodule_hyper_parameters") or {}
    # Lightning keeps the datamodule's state under the name of its class, whatever that is.
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
