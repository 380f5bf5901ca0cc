"""An exported ALBEF: the folder that `save_pretrained` writes, and that `from_pretrained` and `weights` read."""

import inspect
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ...common.errors import UserError
from ...common.files import check_free, replacing
from .official import QUEUES
from .weights import CONFIG_FILE, WEIGHTS_FILE, load_state, read_folder, tied_names

if TYPE_CHECKING:
    from .module import ALBEFModule

Module = TypeVar("Module", bound="ALBEFModule")


def save_folder(module: "ALBEFModule", folder: str | Path, tokenizer_json: str | None = None) -> None:
    """Write `model.safetensors`, `config.json` and the tokenizer, if given, atomically.

    Args:
        module: module to write, without its queues, which only its training uses.
        folder: new or empty folder.
        tokenizer_json: the tokenizer as the JSON text of the `tokenizers` library.

    Raises:
        UserError: if the folder exists and is not empty.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    state = module.state_dict()
    tied = tied_names(state)  # safetensors refuses shared tensors
    kept = {
        name: tensor.contiguous() for name, tensor in state.items() if name not in tied and not name.startswith(QUEUES)
    }
    config = {
        "class": type(module).__name__,
        "vlightning_version": version("vlightning"),
        "arguments": arguments_without_weights(module.hparams),
        "preprocessing": module.preprocessing(),
    }
    with replacing(target) as staged:
        staged.mkdir()
        save_file(kept, staged / WEIGHTS_FILE, metadata={"format": "pt"})
        (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer_json is not None:
            _save_tokenizer(module, tokenizer_json, staged)


def load_folder(cls: type[Module], folder: str | Path) -> Module:
    """Rebuild a module from a folder of `save_folder`, in eval mode and in the precision of the file.

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


def rebuild(cls: type[Module], arguments: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Module:
    """Build a module from saved arguments and a state dict, with or without queues, in the state's precision.

    Raises:
        UserError: if the arguments are not those of this class, or the state does not fit.
    """
    unknown = sorted(arguments.keys() - inspect.signature(cls).parameters)
    if unknown:
        raise UserError(
            f"Expected arguments of {cls.__name__} in {source}, got {unknown[0]!r}: use the class and the version of "
            "vlightning that wrote it."
        )
    module = cls(**arguments)
    if "temperature" in state:
        module.to(state["temperature"].dtype)
    load_state(module, state, source, queues=any(name.startswith(QUEUES) for name in state))
    return module


def arguments_without_weights(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved constructor arguments that rebuild a module whose weights come from elsewhere."""
    # Names that begin with an underscore record the class; the command line adds them.
    arguments = {name: value for name, value in hparams.items() if not name.startswith("_")}
    groups = {name: dict(arguments[name]) | {"weights": None} for name in ("vision", "text") if name in arguments}
    return arguments | groups | dict.fromkeys(("weights", "optimizer", "lr_scheduler"))


def _save_tokenizer(module: "ALBEFModule", text: str, folder: Path) -> None:
    """Write `tokenizer.json` and the special tokens, which the JSON does not contain."""
    tokenizer = Tokenizer.from_str(text)
    special = {f"{name}_token": tokenizer.id_to_token(number) for name, number in module.text.special_token_ids.items()}
    unknown = getattr(tokenizer.model, "unk_token", None)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, **special).save_pretrained(folder)
