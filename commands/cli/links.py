"""Links from the data to the module: arguments with the same name, whose value is taken from the data.

And from the data of a checkpoint to other data: how a text becomes token ids.
"""

from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule

from ...common.class_arguments import subclasses
from ...common.errors import UserError
from .saved_run import SavedRun
from .typed_values import Typed, at

LINKED = (
    *("vocab_size", "max_tokens", "language_model", "num_classes"),
    *("image_size", "image_mean", "image_std", "image_interpolation"),
)
TEXTS = ("tokenizer", "vocab_size", "max_tokens", "append_sep", "clean_captions", "max_words")
"""Arguments of a datamodule that decide how a text becomes token ids."""


def apply_links(config: Any, typed: Typed, saved: SavedRun | None) -> list[str]:
    """Set arguments of the module, also those in a group of settings, to the values of the data.

    Texts are encoded as in the data of the checkpoint, if not given otherwise, also by another class of data.

    If the value of the data was not given, the value in the checkpoint is used for both sides. The module keeps the
    vocabulary size of the checkpoint if it is smaller than that of the data.

    The links of jsonargparse do not suffice: they do not know which value was given, and refuse a config file with a
    value for the module even if it is the same, as in the hyper-parameters of a checkpoint.

    Returns:
        The arguments of the module that were taken from the data, such as `vocab_size` or `text.vocab_size`.

    Raises:
        UserError: If a value of the module was given and differs from the value of the data.
    """
    source = (config.get("data") or {}).get("init_args") or {}
    target = (config.get("model") or {}).get("init_args") or Namespace()
    saved_source = _data_arguments(saved) if saved else {}
    for name in TEXTS:
        if name in source and name in saved_source and typed.origin(f"data.init_args.{name}") is None:
            source[name] = saved_source[name]
    saved_target = saved.hyper_parameters.get("model", {}).get("init_args", {}) if saved else {}
    linked = [(name, argument) for name in LINKED if source.get(name) is not None for argument in _keys(target, name)]
    for name, argument in linked:
        saved_value = at(saved_target, argument)
        origin = typed.origin(f"model.init_args.{argument}")
        if saved_value is not None and origin is None:
            if typed.origin(f"data.init_args.{name}") is None:
                source[name] = saved_value
            elif name == "vocab_size" and saved_value < source[name]:
                # The value of the data is a limit, the value in the checkpoint is the actual size of the tokenizer.
                target[argument] = saved_value
                continue
        if target[argument] != source[name] and origin is not None:
            raise UserError(
                f"Expected the same {name} for module and data, got model.init_args.{argument}={target[argument]!r} "
                f"from {origin} and data.init_args.{name}={source[name]!r}: set data.init_args.{name} only."
            )
        target[argument] = source[name]
    return [argument for _, argument in linked]


def _data_arguments(saved: SavedRun) -> dict[str, Any]:
    """Return the arguments of the checkpoint's data, also those that its class fixes."""
    data = saved.hyper_parameters.get("data", {})
    cls = subclasses((LightningDataModule,)).get(data.get("class_path", "").rpartition(".")[2])
    return {**getattr(cls, "text_options", {}), **data.get("init_args", {})}


def _keys(arguments: Namespace, name: str) -> list[str]:
    """Return the keys of all arguments with a name: the argument itself, or else fields of groups of settings."""
    if name in arguments:
        return [name]
    groups = {group: value for group, value in vars(arguments).items() if isinstance(value, Namespace)}
    return [f"{group}.{name}" for group, value in groups.items() if "class_path" not in value and name in value]
