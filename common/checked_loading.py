"""`load_from_checkpoint` that runs only code of this package, for modules and datamodules."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from lightning.pytorch.core.saving import CHECKPOINT_PAST_HPARAMS_KEYS
from lightning.pytorch.plugins.io import TorchCheckpointIO

from .absent_network import leave_out_networks
from .errors import UserError
from .named_code import INSTANTIATORS, ForeignCode, TypedNames, check_arguments, imported
from .private_api import allow_instantiator


class CheckedLoading:
    """Mixin before LightningModule or LightningDataModule that checks the names in a checkpoint.

    Lightning checks the class of a checkpoint, and passes its arguments to jsonargparse, which imports and calls every
    name in them, and opens every file that they name (2.6.6).
    """

    CHECKPOINT_HYPER_PARAMS_KEY: str

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Build the object of a checkpoint as Lightning does, after a check of the code that the checkpoint names.

        Args:
            checkpoint_path: A file, its path, or its URL.
            *args: As Lightning takes them.
            **kwargs: As Lightning takes them: arguments of the class replace those of the checkpoint. With
                `weights_only=False` the checkpoint is trusted, and may run any code.

        Returns:
            The object.

        Raises:
            UserError: If the checkpoint is of another class, or names other code than classes of this package and
                optimizers of torch.
        """
        if kwargs.get("weights_only") is not False:
            kwargs["weights_only"] = True  # Lightning's default depends on the location of the file
            content = load_plain(checkpoint_path)
            if hasattr(checkpoint_path, "seek"):
                checkpoint_path.seek(0)
            kwargs = cls._checked(content, str(checkpoint_path), kwargs) | kwargs
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _checked(cls, content: Mapping[str, Any], path: str, replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked arguments of a checkpoint, which Lightning then uses in place of the file's."""
        saved: dict[str, Any] = {}
        for name in (*CHECKPOINT_PAST_HPARAMS_KEYS, cls.CHECKPOINT_HYPER_PARAMS_KEY):  # as Lightning reads them
            saved |= content.get(name) or {}
        if saved.get("_instantiator") not in INSTANTIATORS:  # then Lightning does not use jsonargparse, or refuses
            return {}
        saved_class: type = cls
        if "_class_path" in saved:
            path_of_class = str(saved["_class_path"])
            imported_class = imported(path_of_class)
            if imported_class is None or not issubclass(imported_class, cls):
                raise UserError(
                    f"Expected a checkpoint of {cls.__name__}, got {path!r} of "
                    f"{path_of_class if imported_class is None else imported_class.__name__}: load it with its own "
                    "class."
                )
            saved_class = imported_class
        left_out = ("_instantiator", "_class_path", *replaced)
        arguments = {name: value for name, value in saved.items() if name not in left_out}
        leave_out_networks(arguments)
        try:
            return check_arguments(arguments, saved_class, TypedNames(), "") | {"_instantiator": _INSTANTIATOR}
        except ForeignCode as error:
            name = error.key.strip(".")
            raise UserError(
                f"Expected classes of vlightning or torch.optim in the checkpoint {path!r}, got {error.name!r} for "
                f"{name}, which could run any code: pass {name.partition('.')[0]}=... to load_from_checkpoint, or "
                "weights_only=False if you trust the file."
            ) from error


def load_plain(path: Any) -> Any:
    """Load a checkpoint from a file, path or URL, without weights and without running code.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    if hasattr(path, "seek"):
        return torch.load(path, map_location="meta", weights_only=True)
    device: Any = "meta"
    return TorchCheckpointIO().load_checkpoint(path, map_location=device, weights_only=True)


def instantiate(cls: type, arguments: dict[str, Any]) -> Any:
    """Build an object as Lightning's `instantiate_module` does, without replacing names of files by their content.

    The argument `_class_path` names a subclass of `cls`.
    """
    from .verbatim import VerbatimText  # here, since methods are used without the command line's libraries

    parser = VerbatimText(exit_on_error=False)
    if "_class_path" in arguments:
        parser.add_subclass_arguments(cls, "built", fail_untyped=False)
        init_args = {name: value for name, value in arguments.items() if name != "_class_path"}
        arguments = {"class_path": arguments["_class_path"], "dict_kwargs": init_args}
    else:
        parser.add_class_arguments(cls, "built", fail_untyped=False)
    return parser.instantiate(parser.parse_object({"built": arguments})).built


_INSTANTIATOR = f"{__name__}.{instantiate.__name__}"
allow_instantiator(_INSTANTIATOR)
