"""The contract between a LightningModule and its datamodule.

Both meet in a trainer: a datamodule reads `trainer.lightning_module`, a module reads `trainer.datamodule`. Each side
works without the other one's members, which are optional, and asks for nothing that is not listed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...common.errors import UserError

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch
    from PIL import Image

    from ..transforms.replay import Interpolation

# What a datamodule may ask of its module.


class ExpectsPreprocessing(Protocol):
    """A module whose weights expect images to be preprocessed in a certain way. Datamodules of images ask."""

    def expected_preprocessing(self) -> Mapping[str, Any]:
        """Return some of the keys of :func:`~..transforms.normalize.preprocessing`; empty if nothing is expected.

        The key ``transform`` instead names the class of a transform that a checkpoint does not contain.
        """


class AdoptsVocabulary(Protocol):
    """A module that can take over the size of a trained vocabulary. :class:`PairDataModule` asks."""

    def adopt_vocabulary(self, size: Callable[[], int]) -> None:
        """Take over the number of entries of a tokenizer that the datamodule trains; ``size`` trains it if needed."""


class NamesViews(Protocol):
    """A module that trains on several augmented views of an image. :class:`LabelDataModule` asks."""

    @property
    def views(self) -> Sequence[str]:
        """Names of the views in a training batch, such as ``["image", "image_slow"]``."""


class EmbedsAugmentations(Protocol):
    """A module that embeds augmented images into a reinforced dataset. :class:`ReinforcementDataModule` asks."""

    @property
    def views(self) -> Sequence[tuple[int, Interpolation]]:
        """Image size and interpolation of each kind of view that a teacher embeds."""

    @property
    def whole(self) -> Callable[[Image.Image], torch.Tensor] | None:
        """Transform of the captioner's input, or None without a captioner."""


# What a module may ask of its datamodule.


class PreprocessesImages(Protocol):
    """A datamodule of images."""

    @property
    def preprocessing(self) -> Mapping[str, Any] | None:
        """What evaluation does to an image, with the keys of :func:`~..transforms.normalize.preprocessing`."""

    @property
    def normalization(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation that training images are normalized with, or None if unknown."""


class Tokenizes(Protocol):
    """A datamodule of captions: every :class:`PairDataModule`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""

    @property
    def special_token_ids(self) -> Mapping[str, int | None]:
        """Ids of ``pad``, ``cls``, ``sep`` and ``mask``."""


class NamesClasses(Protocol):
    """A datamodule of labelled images: every :class:`LabelDataModule`."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def class_names(self) -> Sequence[str] | None:
        """Names of the classes by index, or None if the data has only indices."""

    @property
    def views(self) -> Sequence[str]:
        """Names of the views in a training batch."""

    def every_image(self, split: Any) -> Iterable[Mapping[str, Any]]:
        """Iterate once over the images of a split, preprocessed as in evaluation."""


Asked = TypeVar("Asked")


def asked(module: Any, protocol: type[Asked]) -> Asked | None:
    """Return a module as one side of the contract, or None if it has none of the members of the protocol.

    Args:
        module: the other side.
        protocol: a protocol of this file.

    Raises:
        UserError: a member is missing beside others, or a method is not callable.
    """
    members = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    # A property is not read: its value may not be known yet.
    missing = object()
    present = {name for name in members if inspect.getattr_static(module, name, missing) is not missing}
    if not present:
        return None
    for name, member in members.items():
        is_method = inspect.isfunction(member)
        if name not in present or (is_method and not callable(getattr(module, name))):
            raise UserError(
                f"Expected {type(module).__name__}.{name} to be a {'method' if is_method else 'property'} "
                f"({protocol.__name__} in {__name__}), got {getattr(module, name, 'nothing')!r}: define it."
            )
    found: Asked = module
    return found


def asked_of(trainer: pl.Trainer | None, protocol: type[Asked]) -> Asked | None:
    """Return a trainer's module as one side of the contract, or None if there is no such module; see :func:`asked`."""
    return None if trainer is None else asked(trainer.lightning_module, protocol)
