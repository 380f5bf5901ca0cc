"""`load_from_checkpoint` that runs no code but this package's, for modules and datamodules."""

from collections.abc import Mapping
from typing import Any, Self

from .named_code import ForeignCode, TypedNames, check_arguments, imported
from .private_api import load_plain


class CheckedLoading:
    """Comes before LightningModule or LightningDataModule among the bases of a class.

    Lightning checks what a checkpoint names as the class of the whole, and hands the arguments to jsonargparse, which
    imports and calls whatever they name (2.6.6).
    """

    CHECKPOINT_HYPER_PARAMS_KEY: str

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Build the object that a checkpoint describes, as Lightning does, after a look at the code that it names.

        Args:
            checkpoint_path: A file, its path, or its URL.
            *args: As Lightning takes them.
            **kwargs: As Lightning takes them: arguments of the class replace those of the checkpoint. With
                `weights_only=False` the checkpoint is trusted, and may run any code.

        Returns:
            The object.

        Raises:
            ValueError: If the checkpoint is of another class, or names other code than classes of this package and
                optimizers of torch.
        """
        if kwargs.get("weights_only") is not False:
            kwargs["weights_only"] = True  # where Lightning's default depends on where the file is
            content = load_plain(checkpoint_path)
            if hasattr(checkpoint_path, "seek"):
                checkpoint_path.seek(0)
            cls._check_names(content.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}, str(checkpoint_path), kwargs)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _check_names(cls, saved: Mapping[str, Any], path: str, replaced: Mapping[str, Any]) -> None:
        if "_instantiator" not in saved:  # then the arguments are taken as they are
            return
        built: type = cls
        if "_class_path" in saved:
            found = imported(str(saved["_class_path"]))
            if found is None or not issubclass(found, cls):
                name = str(saved["_class_path"])
                raise ValueError(
                    f"The checkpoint {path!r} is of {name if found is None else found.__name__}, expected one of "
                    f"{cls.__name__}: load it with its own class."
                )
            built = found
        own = {name: value for name, value in saved.items() if name not in ("_instantiator", "_class_path", *replaced)}
        try:
            check_arguments(own, built, TypedNames(), "")
        except ForeignCode as error:
            name = error.key.strip(".")
            raise ValueError(
                f"The checkpoint {path!r} names {error.name!r} for {name}, which is no class of vlightning or of "
                f"torch.optim, so that it could run any code: pass {name.partition('.')[0]}=... to "
                "load_from_checkpoint, or weights_only=False where you trust the file."
            ) from error
