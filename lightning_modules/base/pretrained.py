"""An exported module: the folder that `save_pretrained` writes, and that `from_pretrained` and `weights` read."""

import inspect
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ...common.errors import UserError
from ...common.files import check_free, replacing
from .checkpoints import class_name

if TYPE_CHECKING:
    from .method import Method

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
LAYOUT = "a folder with model.safetensors, config.json and the tokenizer"
"""Description of the folder for `vlightning export`."""
TokenizerOf = Callable[[Mapping[str, Any]], tuple[str | None, str]]
"""Function from a checkpoint to its data's tokenizer as JSON text, and a note on it for the message."""
Module = TypeVar("Module", bound="Method")


def without_tokenizer(checkpoint: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return no tokenizer, for exports from Python that give none."""
    return None, "without a tokenizer"


def export_folder(module: "Method", content: Mapping[str, Any], target: str, tokenizer_of: TokenizerOf) -> str:
    """Write the folder of a module that was rebuilt from a checkpoint, and return what was written, for a message."""
    tokenizer, note = tokenizer_of(content)
    module.save_pretrained(target, tokenizer)
    return f"Wrote {target} {note}; {type(module).__name__}.from_pretrained({target!r}) reads it"


def tokenizer_of_data(datamodule: Any | None) -> str | None:
    """Return the tokenizer of a datamodule as JSON text; None without one of the `tokenizers` library."""
    backend = getattr(getattr(datamodule, "tokenizer", None), "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())


def write_folder(
    module: "Method", state: dict[str, Tensor], folder: str | Path, tokenizer_json: str | None = None
) -> None:
    """Write `model.safetensors`, `config.json` and the tokenizer, if given, atomically.

    Args:
        module: module to write.
        state: its state dict, gathered if it is sharded.
        folder: new or empty folder.
        tokenizer_json: the tokenizer as the JSON text of the `tokenizers` library.

    Raises:
        UserError: if the folder exists and is not empty.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    state = {name: tensor.contiguous() for name, tensor in module.pretrained_state(state).items()}
    config = {
        "class": class_name(module),
        "vlightning_version": version("vlightning"),
        "arguments": arguments_without_weights(module.hparams),
        "preprocessing": module.preprocessing(),
    }
    with replacing(target) as staged:
        staged.mkdir()
        save_file(state, staged / WEIGHTS_FILE, metadata={"format": "pt"})
        (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer_json is not None:
            _save_tokenizer(module, tokenizer_json, staged)


def read_module(cls: type[Module], folder: str | Path) -> Module:
    """Rebuild a module from a folder of `write_folder`, in eval mode and in the precision of the file.

    Raises:
        UserError: if the folder is not an export of this class, or is damaged.
    """
    config, state = read_folder(Path(folder).expanduser())
    if config["class"] != cls.__name__:
        raise UserError(
            f"Expected an export of {cls.__name__} in {str(folder)!r}, got one of {config['class']}: load it with that "
            "class."
        )
    source = f"the export {str(folder)!r} of vlightning {config['vlightning_version']}"
    module = rebuild(cls, config["arguments"], state, source).eval()
    module.adopt_preprocessing(config.get("preprocessing"))
    return module


def is_folder(path: Path) -> bool:
    """Return whether a path is an exported folder."""
    return (path / CONFIG_FILE).is_file()


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the state of an exported folder.

    Raises:
        UserError: if the folder is not an export, or is damaged.
    """
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"Expected the folder of an export, got {str(folder)!r} without {' and without '.join(missing)}: correct "
            "the path, or write an export with `vlightning export`."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        state = load_file(folder / WEIGHTS_FILE)
    except (ValueError, SafetensorError) as error:
        raise UserError(
            f"Expected a readable export in {str(folder)!r}, got a damaged one ({error}): export it again."
        ) from error
    if not isinstance(config, dict) or not {"class", "vlightning_version", "arguments"} <= config.keys():
        raise UserError(
            f"Expected the {CONFIG_FILE} of an export in {str(folder)!r}, got another file: correct the path."
        )
    return config, state


def rebuild(cls: type[Module], hparams: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Module:
    """Build a module from saved arguments and the state dict of an export or a checkpoint, in the state's precision.

    Raises:
        UserError: if the arguments are not those of this class, or the state does not fit.
    """
    arguments = arguments_without_weights(hparams)
    unknown = sorted(arguments.keys() - inspect.signature(cls).parameters)
    if unknown:
        raise UserError(
            f"Expected arguments of {cls.__name__} in {source}, got {unknown[0]!r}: use the class and the version of "
            "vlightning that wrote it."
        )
    module = cls(**arguments)
    precision = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
    module.to(precision)
    module.load_pretrained_state(state, source)
    return module


def arguments_without_weights(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved constructor arguments that rebuild a module whose weights come from elsewhere."""
    # Names that begin with an underscore record the class; the command line adds them.
    arguments = {name: value for name, value in hparams.items() if not name.startswith("_")}
    for name in ("vision", "text"):
        if "weights" in (arguments.get(name) or {}):
            arguments[name] = dict(arguments[name]) | {"weights": None}
    return arguments | {name: None for name in ("weights", "optimizer", "lr_scheduler") if name in arguments}


def _save_tokenizer(module: "Method", text: str, folder: Path) -> None:
    """Write `tokenizer.json` and the special tokens, which the JSON does not contain."""
    tokenizer = Tokenizer.from_str(text)
    numbers = getattr(getattr(module, "text", None), "special_token_ids", {})
    special = {f"{name}_token": tokenizer.id_to_token(number) for name, number in numbers.items()}
    unknown = getattr(tokenizer.model, "unk_token", None)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, **special).save_pretrained(folder)
