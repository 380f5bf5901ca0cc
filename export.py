"""Weights out of a training checkpoint: `python -m vlightning.export <checkpoint> <target>`."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlightning.callbacks import AtomicCheckpointIO
from vlightning.cli_support.report import DEBUG_VARIABLE, spoken
from vlightning.datamodules.text import open_tokenizer, set_ending, tokenizer_from_json
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.checkpoint import save_official
from vlightning.lightning_modules.albef.pretrained import arguments_without_weights, check_free, rebuild

DESCRIPTION = (
    "Take the model out of a training's checkpoint: to use it without a Trainer (ALBEFModule.from_pretrained), "
    "to start another training from it (model.weights), or to use it in the code of ALBEF's authors."
)


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: The words after the program's name; None takes them from `sys.argv`.

    Raises:
        SystemExit: With status 2 for what cannot be understood, 1 for a checkpoint that cannot be exported.
    """
    parser = argparse.ArgumentParser("python -m vlightning.export", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("checkpoint", help="a .ckpt file that a training wrote, or the folder of a sharded one")
    parser.add_argument("target", help="the folder, or for the authors' layout the file, to write; must not exist")
    parser.add_argument(
        "--layout",
        choices=("vlightning", "albef"),
        default="vlightning",
        help="vlightning: a folder with model.safetensors, config.json and the tokenizer; albef: a .pth file in the "
        "authors' layout, that of pre-training if the model has a language-model head, else that of retrieval",
    )
    words = parser.parse_args(args)
    try:
        done = export(words.checkpoint, words.target, words.layout)
    except Exception as error:
        sentence = spoken(error)
        if sentence is None or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            raise
        sys.stderr.write(f"vlightning.export: error: {sentence}\n")
        raise SystemExit(1) from None
    sys.stdout.write(f"{done}\n")


def export(checkpoint: str, target: str, layout: str = "vlightning") -> str:
    """Write the model of a training checkpoint.

    Args:
        checkpoint: What the training wrote.
        target: What to write.
        layout: "vlightning" or "albef".

    Returns:
        What was written.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the target is there already.
        ValueError: If the checkpoint is not of a module that can be exported.
        RuntimeError: If it cannot be read.
    """
    if not Path(checkpoint).exists():
        raise FileNotFoundError(f"Found no checkpoint {checkpoint!r}, expected a .ckpt file of a training.")
    check_free(Path(target))
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    module = _module(content, checkpoint)
    if layout == "albef":
        if Path(target).is_dir():
            raise FileExistsError(f"Found a folder {target!r}, expected the name of a new file, such as albef.pth.")
        save_official(module, target)
        family = "pre-training" if module.hparams["mlm"] else "retrieval"
        return f"Wrote {target} in the authors' {family} layout."
    tokenizer, note = _tokenizer(content)
    module.save_pretrained(target, tokenizer)
    return f"Wrote {target} {note}; ALBEFModule.from_pretrained({target!r}) reads it."


def _module(content: Mapping[str, Any], checkpoint: str) -> ALBEFModule:
    """The module that a checkpoint is of."""
    arguments, state = content.get("hyper_parameters"), content.get("state_dict")
    if not isinstance(arguments, Mapping) or not isinstance(state, Mapping):
        raise ValueError(
            f"Found no hyper_parameters beside a state_dict in {checkpoint!r}, expected a checkpoint that "
            "`vlightning fit` or a Trainer wrote."
        )
    name = str(arguments.get("_class_path", ALBEFModule.__name__)).rsplit(".", 1)[-1]
    if name != ALBEFModule.__name__:
        raise ValueError(f"Found a checkpoint of {name} in {checkpoint!r}, expected one of {ALBEFModule.__name__}.")
    return rebuild(ALBEFModule, arguments_without_weights(arguments), state, f"the checkpoint {checkpoint!r}")


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


if __name__ == "__main__":
    main()
