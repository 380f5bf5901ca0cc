"""`load_from_checkpoint` that runs only code of this package, for modules and datamodules."""

from collections.abc import Mapping
from typing import Any, Self

from .errors import UserError
from .named_code import ForeignCode, TypedNames, check_arguments, imported
from .private_api import load_plain


class CheckedLoading:
    """Mixin before LightningModule or LightningDataModule that checks the names in a checkpoint.

    Lightning checks the class of a checkpoint, and passes its arguments to jsonargparse, which imports and calls every
    name in them (2.6.6).
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
            cls._check_names(content.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}, str(checkpoint_path), kwargs)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _check_names(cls, saved: Mapping[str, Any], path: str, replaced: Mapping[str, Any]) -> None:
        if "_instantiator" not in saved:  # then jsonargparse is not used
            return
        built: type = cls
        if "_class_path" in saved:
            found = imported(str(saved["_class_path"]))
            if found is None or not issubclass(found, cls):
                name = str(saved["_class_path"])
                raise UserError(
                    f"Expected a checkpoint of {cls.__name__}, got {path!r} of "
                    f"{name if found is None else found.__name__}: load it with its own class."
                )
            built = found
        own = {name: value for name, value in saved.items() if name not in ("_instantiator", "_class_path", *replaced)}
        try:
            check_arguments(own, built, TypedNames(), "")
        except ForeignCode as error:
            name = error.key.strip(".")
            raise UserError(
                f"Expected classes of vlightning or torch.optim in the checkpoint {path!r}, got {error.name!r} for "
                f"{name}, which could run any code: pass {name.partition('.')[0]}=... to load_from_checkpoint, or "
                "weights_only=False if you trust the file."
            ) from error
