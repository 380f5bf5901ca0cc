"""The contract between a LightningModule and its datamodule.

Each side finds the other in the trainer: a datamodule reads `trainer.lightning_module`, a module reads
`trainer.datamodule`. The members of the other side are optional, and only members in this file are read.
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

    from ...common.preprocessing import Interpolation

# Members of a module that datamodules read.


class ExpectsPreprocessing(Protocol):
    """A module whose weights expect a certain preprocessing of images; read by datamodules of images."""

    def expected_preprocessing(self) -> Mapping[str, Any]:
        """Return some of the keys of `preprocessing`; empty if nothing is expected.

        The key `transform` instead names the class of a transform that a checkpoint does not contain.
        """


class AdoptsVocabulary(Protocol):
    """A module that can adopt the size of a trained vocabulary; read by `TextDataModule`."""

    def adopt_vocabulary(self, size: Callable[[], int]) -> None:
        """Adopt the number of entries of a tokenizer that the datamodule trains.

        Args:
            size: returns the number of entries, and trains the tokenizer if needed.
        """


class ExpectsTexts(Protocol):
    """A module with a trained text encoder; read by `TextDataModule`."""

    def expected_tokenizer(self) -> str | None:
        """Return the folder or hub name of the encoder's tokenizer, for data without one; None for no such encoder."""

    @property
    def text_prefix(self) -> str:
        """Text that the encoder expects before each text; mostly empty."""


class TokenizesForTeachers(Protocol):
    """A module with teachers that take other token ids than its student; read by `PairDataModule`."""

    @property
    def teacher_tokenizers(self) -> Mapping[str, Callable[[list[str]], torch.Tensor]]:
        """Tokenizers of these teachers by the name of their ids, long [B, L], in a training batch."""


class NamesViews(Protocol):
    """A module that trains on several augmented views of an image; read by `LabelDataModule`."""

    @property
    def views(self) -> Sequence[str]:
        """Names of the views in a training batch, such as `["image", "image_slow"]`."""


class EmbedsAugmentations(Protocol):
    """A module that embeds augmented images for a reinforced dataset; read by `ReinforcementDataModule`."""

    @property
    def views(self) -> Sequence[tuple[int, Interpolation]]:
        """Image size and interpolation of each kind of view that a teacher embeds."""

    @property
    def caption_transform(self) -> Callable[[Image.Image], torch.Tensor | list[torch.Tensor]] | None:
        """Transform of the image without augmentation to the captioner's input, or the list of the inputs of several.

        None without a captioner.
        """


class LocksTowers(Protocol):
    """A module whose locked towers need not run, as their features come from a store; read by `ImageTextDataModule`."""

    @property
    def locked_towers(self) -> Sequence[str]:
        """Towers whose features stay the same in the training, among `image` and `text`."""


# Members of a datamodule that modules read.


class PreprocessesImages(Protocol):
    """A datamodule of images."""

    @property
    def preprocessing(self) -> Mapping[str, Any] | None:
        """Preprocessing of images in evaluation, with the keys of `preprocessing`."""

    @property
    def normalization(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation that training images are normalized with, or None if unknown."""


class Tokenizes(Protocol):
    """A datamodule of captions: every `TextDataModule`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""

    @property
    def special_token_ids(self) -> Mapping[str, int | None]:
        """Ids of `pad`, `cls`, `sep` and `mask`."""


class NamesClasses(Protocol):
    """A datamodule of labeled images: every `LabelDataModule`."""

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

    def training_labels(self) -> Sequence[int]:
        """Return the label of each training image by `sample_index`; -1 for an image without a readable label."""


class ListsAnswers(Protocol):
    """A datamodule of questions: every `QuestionDataModule`."""

    @property
    def answers(self) -> Sequence[str]:
        """The answers that are ranked; empty if there is no list."""

    @property
    def encoded_answers(self) -> Mapping[str, torch.Tensor]:
        """The answers as `answer_ids` and `answer_mask`, long [C, L]."""

    def decode_answers(self, ids: torch.Tensor) -> list[str]:
        """Return the texts of token ids [Q, L], special tokens left out."""


class ShowsTexts(Protocol):
    """A datamodule of images with texts; read by figures and writers of predictions."""

    @property
    def predict_texts(self) -> Sequence[str] | None:
        """Texts that prediction embeds beside the images; None without."""

    def captions(self, split: Any, sample_index: Sequence[int]) -> list[list[str]]:
        """Return the raw captions of images by `sample_index`."""

    def question(self, split: Any, sample_index: int) -> str:
        """Return the raw question of a `sample_index`, in data of questions."""


class StoresTeachers(Protocol):
    """A datamodule of reinforced pairs, which hold the embeddings of teachers."""

    @property
    def teachers(self) -> Mapping[str, Any] | None:
        """Widths and logit scales of the teachers; None if the data does not name them."""

    @property
    def teacher_width(self) -> int:
        """Sum of the widths of the stored embeddings."""


class ReinforcesPairs(Protocol):
    """A datamodule whose pairs are reinforced: `ReinforcementDataModule`."""

    @property
    def has_synthetic(self) -> bool:
        """Whether the pairs have synthetic captions already."""

    def account(self, split: Any) -> Any:
        """Return the count of bad rows of a split."""


class StoresFeatures(Protocol):
    """A datamodule whose batches hold features from stores in place of what towers would encode."""

    @property
    def stored(self) -> Mapping[str, Mapping[str, Any]]:
        """By split, name of the `model` of its store, and `towers`, the fingerprint of each whose features are read."""


class StoresTeacherTexts(Protocol):
    """A datamodule of parallel texts, whose batches may hold features in place of the texts that a teacher reads."""

    @property
    def stored_teacher(self) -> Mapping[str, Any] | None:
        """Name of the `model` of the store, and `towers` with the fingerprint of `text`; None without a store."""


class NamesTower(Protocol):
    """A datamodule of image embeddings."""

    @property
    def tower(self) -> Mapping[str, str] | None:
        """Name, weights and fingerprint of the network that computed the embeddings; None if unknown."""


Asked = TypeVar("Asked")


def asked(module: Any, protocol: type[Asked]) -> Asked | None:
    """Return an object typed as a protocol of the contract, or None if it has no member of the protocol.

    Raises:
        UserError: If the object has some members but not all, or a method is not callable.
    """
    members = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    # Properties are not evaluated, since their values may not be computed yet.
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
    typed: Asked = module
    return typed


def asked_of(trainer: pl.Trainer | None, protocol: type[Asked]) -> Asked | None:
    """Return the module of a trainer typed as a protocol, as `asked` does; None without a trainer."""
    return asked(getattr(trainer, "lightning_module", None), protocol)
