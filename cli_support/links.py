"""Values that the data decides and the module takes over: an argument that both have under the same name."""

from typing import Any

from .resume import Saved
from .typed import Typed, UsageError

# The data's value goes to the module, if the module has such an argument.
LINKED = (
    "vocab_size",
    "image_size",
    "image_mean",
    "image_std",
    "image_interpolation",
    "max_tokens",
    "num_classes",
    "language_model",
)


def apply_links(config: Any, typed: Typed, saved: Saved | None) -> list[str]:
    """Set the module's value to the data's wherever both classes have the argument.

    jsonargparse's own links cannot say which value was typed, and refuse a config file that names the target even
    with the same value, as a checkpoint's hyper-parameters do.

    Args:
        config: The parsed configuration of the subcommand; changed in place.
        typed: What was typed.
        saved: What the checkpoint says; where the data's value was not typed, the checkpoint's stands for both, and a
            vocabulary stays as small as it is there.

    Returns:
        Names of the module's arguments that were taken from the data.

    Raises:
        UsageError: If the module's value was typed and differs from the data's.
    """
    source = (config.get("data") or {}).get("init_args") or {}
    target = (config.get("model") or {}).get("init_args") or {}
    typed_for_model, typed_for_data = typed.init_args("model"), typed.init_args("data")
    old = saved.hyper_parameters.get("model", {}).get("init_args", {}) if saved else {}
    linked = [name for name in LINKED if name in source and name in target and source[name] is not None]
    for name in linked:
        if name in old and name not in typed_for_model:
            if name not in typed_for_data:
                source[name] = old[name]
            elif name == "vocab_size" and old[name] < source[name]:
                # The data's is the most that a tokenizer may have, the checkpoint's what it has.
                target[name] = old[name]
                continue
        if target[name] != source[name] and name in typed_for_model:
            raise UsageError(
                f"model.init_args.{name} is {target[name]!r} by {typed_for_model[name]}, but data.init_args.{name} is "
                f"{source[name]!r}; the module takes the data's value, so set data.init_args.{name} only."
            )
        target[name] = source[name]
    return linked
