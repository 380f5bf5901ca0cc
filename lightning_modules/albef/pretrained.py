"""A trained ALBEF out of a file or folder and into a folder: initial weights, and models to use without a Trainer."""

import inspect
import json
import pickle
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ...common.files import check_free, replacing
from ..base.preprocessing import is_checkpoint, preprocessing_of_checkpoint
from .checkpoint import QUEUES, load_official, load_own, tied_names

if TYPE_CHECKING:
    from .module import ALBEFModule

Module = TypeVar("Module", bound="ALBEFModule")
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_INITIAL_WEIGHTS = ("weights", "vision_weights", "text_weights")


def load_trained(module: "ALBEFModule", source: str) -> str:
    """Start student and teacher from a trained ALBEF, without its queues: keys of another model are wrong negatives.

    Args:
        module: what to fill.
        source: a checkpoint of the authors or of ours, or the folder of an export.

    Returns:
        What was done and what was left out, for a log line.

    Raises:
        FileNotFoundError: if there is nothing of that name.
        ValueError: if it is no such file or folder, or does not fit; the sentence says why. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return load_own(module, _read_folder(path)[1], f"the export {source!r}", queues=False)
    if not path.exists():
        raise FileNotFoundError(
            f"Found no file or folder {source!r} to start from, expected a checkpoint of the authors or of ours, or "
            "the folder of an export: correct weights."
        )
    content = _read_file(path)
    if "state_dict" in content:
        return load_own(module, _tensors(content["state_dict"], source), f"the checkpoint {source!r}", queues=False)
    official = _tensors(content.get("model", content), source)
    return load_official(module, official, queues=False, source=f"the authors' checkpoint {source!r}")


def preprocessing_of_source(source: str) -> dict[str, Any] | None:
    """What a trained ALBEF expects to be done with an image, where a checkpoint or the folder of an export says it.

    Args:
        source: as in `load_trained`.
    """
    folder = Path(source).expanduser()
    if is_checkpoint(folder):
        return preprocessing_of_checkpoint(folder)
    return _read_folder(folder)[0].get("preprocessing") if (folder / _CONFIG).is_file() else None


def save_folder(module: "ALBEFModule", folder: str | Path, tokenizer_json: str | None = None) -> None:
    """Write `model.safetensors`, `config.json` and, where there is one, the tokenizer; all of it or nothing.

    Args:
        module: what to write. Its queues are left out: only the training that filled them has a use for them.
        folder: a new or an empty one.
        tokenizer_json: the tokenizer as the JSON text of the `tokenizers` library.

    Raises:
        FileExistsError: if there is something of that name already.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    state = module.state_dict()
    tied = tied_names(state)  # safetensors takes no tensor twice
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
        save_file(kept, staged / _WEIGHTS, metadata={"format": "pt"})
        (staged / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer_json is not None:
            _save_tokenizer(module, tokenizer_json, staged)


def load_folder(cls: type[Module], folder: str | Path) -> Module:
    """Rebuild a module from what `save_folder` wrote, in eval mode and in the precision of the file.

    Raises:
        ValueError: if the folder is no export of this class, or is damaged.
    """
    config, state = _read_folder(Path(folder).expanduser())
    if config["class"] != cls.__name__:
        raise ValueError(f"Found an export of {config['class']} in {str(folder)!r}, expected one of {cls.__name__}.")
    source = f"the export {str(folder)!r} of vlightning {config['vlightning_version']}"
    module = rebuild(cls, config["arguments"], state, source).eval()
    module.adopt_preprocessing(config.get("preprocessing"))
    return module


def rebuild(cls: type[Module], arguments: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Module:
    """Make a module of saved arguments and a state, with which queues may come, in the state's precision.

    Raises:
        ValueError: if the arguments are not those of this class, or the state does not fit.
    """
    unknown = sorted(arguments.keys() - inspect.signature(cls).parameters)
    if unknown:
        raise ValueError(
            f"Found the argument {unknown[0]!r} in {source}, which {cls.__name__} does not have: it is of another "
            "class, or of another version of vlightning."
        )
    # JSON has lists only.
    values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    module = cls(**values)
    if "temperature" in state:
        module.to(state["temperature"].dtype)
    load_own(module, state, source, queues=any(name.startswith(QUEUES) for name in state))
    return module


def arguments_without_weights(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments, among saved ones, that rebuild a module whose weights come from elsewhere."""
    # What begins with an underscore is the command line's note of the class.
    arguments = {name: value for name, value in hparams.items() if not name.startswith("_")}
    return arguments | dict.fromkeys(_INITIAL_WEIGHTS)


def _save_tokenizer(module: "ALBEFModule", text: str, folder: Path) -> None:
    """Write `tokenizer.json`, and beside it which tokens are the special ones, which the JSON does not say."""
    tokenizer = Tokenizer.from_str(text)
    special = {
        f"{name}_token": tokenizer.id_to_token(module.hparams[f"{name}_token_id"])
        for name in ("pad", "cls", "sep", "mask")
    }
    unknown = getattr(tokenizer.model, "unk_token", None)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, **special).save_pretrained(folder)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the state of an export."""
    missing = [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"Found no {' and no '.join(missing)} in {str(folder)!r}, expected the folder of an export: correct the "
            "path, or make one with `vlightning export`."
        )
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        state = load_file(folder / _WEIGHTS)
    except (ValueError, SafetensorError) as error:
        raise ValueError(
            f"The export {str(folder)!r} cannot be read ({error}): it is damaged, export it again."
        ) from error
    if not isinstance(config, dict) or not {"class", "vlightning_version", "arguments"} <= config.keys():
        raise ValueError(f"Found a {_CONFIG} in {str(folder)!r} that is not of an export: correct the path.")
    return config, state


def _read_file(path: Path) -> dict[str, Any]:
    """What a file of `torch.save` holds, tensors and plain data only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise ValueError(
                f"Found {foreign[1]} in {str(path)!r}, expected tensors and plain data: if you trust where it comes "
                "from, load it with torch.load(..., weights_only=False) and save its entry 'model' alone."
            ) from error
        raise ValueError(
            f"Found no checkpoint in {str(path)!r}, expected a file of torch.save: it is damaged or of another kind."
        ) from error
    return content if isinstance(content, dict) else {}


def _tensors(state: Any, source: str) -> dict[str, Tensor]:
    """A state dict, after checking that it is one."""
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"Found neither a state dict nor one under 'model' or 'state_dict' in {source!r}, expected a checkpoint of "
            "the authors or of ours."
        )
    return state
