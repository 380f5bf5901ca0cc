"""An exported module: the folder that `save_pretrained` writes, and that `from_pretrained` and `weights` read."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from ...common.errors import UserError
from ...common.files import check_free, replacing
from ..core.checkpoints import CONFIG_FILE, ORDERS_KEY, WEIGHTS_FILE, class_name, read_folder
from ..core.settings import accepted_names
from ..core.tokenizer_reader import TokenizerOf
from ..core.transformers_files import save_tokenizer
from .model_card import CARD_FILE, Training, model_card
from .provenance import Provenance

if TYPE_CHECKING:
    from .method import Method

LAYOUT = "a folder with model.safetensors, config.json, the tokenizer and README.md, which from_pretrained reads"
"""Description of the folder for `vlightning export`."""
Module = TypeVar("Module", bound="Method")


def export_folder(
    module: "Method", content: Mapping[str, Any], run: Path, target: str, tokenizer_of: TokenizerOf
) -> str:
    """Write the folder of a module that was rebuilt from a checkpoint, and return what was written, for a message."""
    tokenizer, note = tokenizer_of(content)
    module.save_pretrained(target, tokenizer, Training.of_checkpoint(content, run))
    return f"Wrote {target} {note}; {type(module).__name__}.from_pretrained({target!r}) reads it"


def write_folder(
    module: "Method",
    state: dict[str, Tensor],
    folder: str | Path,
    tokenizer_json: str | None,
    training: Training,
) -> None:
    """Write `model.safetensors`, `config.json`, the tokenizer, if given, and `README.md`, atomically.

    Args:
        module: module to write.
        state: its state dict, gathered if it is sharded.
        folder: new or empty folder.
        tokenizer_json: the tokenizer as the JSON text of the `tokenizers` library; None for none.
        training: what is known of the training.

    Raises:
        UserError: If the folder exists and is not empty.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    state = {name: tensor.contiguous() for name, tensor in module.pretrained_state(state).items()}
    preprocessing = module.preprocessing()
    accepted = accepted_names(type(module))  # `hparams` also has what a subclass gives to its base class
    arguments = {name: value for name, value in module.hparams.items() if name in accepted}
    config = {
        "class": class_name(module),
        "vlightning_version": version("vlightning"),
        "arguments": arguments_without_weights(arguments),
        "preprocessing": preprocessing,
        "data": training.text_options(),
        ORDERS_KEY: module.retrieval_orders(),
    }
    card = model_card(module, state, training, preprocessing, target.name)
    with replacing(target) as staged:
        staged.mkdir()
        save_file(state, staged / WEIGHTS_FILE, metadata={"format": "pt"})
        (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (staged / CARD_FILE).write_text(card, encoding="utf-8")
        module.write_networks(staged)
        if tokenizer_json is not None:
            _save_tokenizer(module, tokenizer_json, staged)


def read_module(cls: type[Module], folder: str | Path) -> Module:
    """Rebuild a module from a folder of `write_folder`, in eval mode and in the precision of the file.

    Raises:
        UserError: If the folder is not an export of this class, or is damaged.
    """
    config, state = read_folder(Path(folder).expanduser())
    if config["class"] != cls.__name__:
        raise UserError(
            f"Expected an export of {cls.__name__} in {str(folder)!r}, got one of {config['class']}: load it with that "
            "class."
        )
    source = f"the export {str(folder)!r} of vlightning {config['vlightning_version']}"
    module = rebuild(cls, config["arguments"], state, source).eval()
    module.read_networks(Path(folder).expanduser())
    module.adopt_preprocessing(config.get("preprocessing"))
    tokenizer = Path(folder).expanduser() / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    module.provenance = Provenance(training=Training(config.get("data") or {}), tokenizer_json=text)
    module.adopt_retrieval_orders(config.get(ORDERS_KEY))
    return module


def rebuild(cls: type[Module], hparams: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Module:
    """Build a module from saved arguments and the state dict of an export or a checkpoint, in the state's precision.

    Raises:
        UserError: If the arguments are not those of this class, or the state does not fit.
    """
    arguments = arguments_without_weights(hparams)
    unknown = sorted(arguments.keys() - accepted_names(cls))
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
    """Write the tokenizer with the special tokens of the module, which the JSON text does not contain."""
    numbers = getattr(getattr(module, "text", None), "special_token_ids", {})
    length = module.data_sizes().max_tokens or getattr(module, "max_tokens", None)
    save_tokenizer(text, folder, {name: number for name, number in numbers.items() if number is not None}, length)
