"""Values that the data decides and the module takes: an argument that both have under the same name."""

from typing import Any

from jsonargparse import Namespace

from ..callbacks.checkpoints.saved_run import SavedRun
from ..common.errors import UserError
from ..common.typed_values import Typed, at

LINKED = (
    *("vocab_size", "max_tokens", "language_model", "num_classes"),
    *("image_size", "image_mean", "image_std", "image_interpolation"),
)


def apply_links(config: Any, typed: Typed, saved: SavedRun | None) -> list[str]:
    """Set the module's value to the data's wherever both have the argument, the module perhaps in a group of settings.

    jsonargparse's own links cannot say which value was typed, and refuse a config file that names the target even
    with the same value, as a checkpoint's hyper-parameters do.

    Where the data's value was not typed, the checkpoint's, if any, is used for both; a vocabulary stays as small as it
    is there. The parsed configuration is changed in place.

    Returns:
        The module's arguments that were taken from the data, as `vocab_size` or `text.vocab_size`.

    Raises:
        UserError: If the module's value was typed and differs from the data's.
    """
    source = (config.get("data") or {}).get("init_args") or {}
    target = (config.get("model") or {}).get("init_args") or Namespace()
    old = saved.hyper_parameters.get("model", {}).get("init_args", {}) if saved else {}
    linked = [(name, place) for name in LINKED if source.get(name) is not None for place in _places(target, name)]
    for name, place in linked:
        was, by = at(old, place), typed.origin(f"model.init_args.{place}")
        if was is not None and by is None:
            if typed.origin(f"data.init_args.{name}") is None:
                source[name] = was
            elif name == "vocab_size" and was < source[name]:
                # The data's value is a limit for the tokenizer, the checkpoint's its actual size.
                target[place] = was
                continue
        if target[place] != source[name] and by is not None:
            raise UserError(
                f"model.init_args.{place} is {target[place]!r} by {by}, but data.init_args.{name} is "
                f"{source[name]!r}; the module takes the data's value, so set data.init_args.{name} only."
            )
        target[place] = source[name]
    return [place for _, place in linked]


def _places(arguments: Namespace, name: str) -> list[str]:
    """Return where the arguments have the name: at the top level, else in groups of settings."""
    if name in arguments:
        return [name]
    groups = {group: value for group, value in vars(arguments).items() if isinstance(value, Namespace)}
    return [f"{group}.{name}" for group, value in groups.items() if "class_path" not in value and name in value]
