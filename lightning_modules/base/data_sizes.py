"""What a module expects of images and token ids, compared with what the data brings before a network sees it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning import LightningModule
from torch import Tensor

from .trainers import datamodule_of


class DataSizes(NamedTuple):
    """What a network can take; None where it takes any.

    Args:
        image_size: side S of the images [B, 3, S, S], pixels.
        vocab_size: token ids are below this.
        max_tokens: longest sequence of token ids.
    """

    image_size: int | None = None
    vocab_size: int | None = None
    max_tokens: int | None = None


class DataSizesModule(LightningModule):
    """A LightningModule that compares these sizes with the first batch of each epoch.

    The command line sets such sizes of the module from the data's. From Python they can differ, which would end in an
    IndexError of an embedding or in the words of the library that a network is from. A subclass calls `super()` where
    it overrides a hook.
    """

    def data_sizes(self) -> DataSizes:
        """What the networks can take; by default the hyperparameters `image_size` and `vocab_size`."""
        return DataSizes(self.hparams.get("image_size"), self.hparams.get("vocab_size"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare the first batch."""
        self._compare_first(batch, batch_idx)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Compare the first batch."""
        self._compare_first(batch, batch_idx)

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Compare the first batch."""
        self._compare_first(batch, batch_idx)

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Compare the first batch."""
        self._compare_first(batch, batch_idx)

    def _compare_first(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and isinstance(batch, Mapping):
            self.compare_sizes(batch)

    def compare_sizes(self, batch: Mapping[str, Any]) -> None:
        """Compare images and token ids with `data_sizes`.

        The ids that can come are known by the data's tokenizer; without one, those of the batch stand for them, for
        which a GPU is waited for.

        Args:
            batch: a dict as all batches of this package are.

        Raises:
            ValueError: if something does not fit.
        """
        free = "vocab_size" in self.hparams and self.hparams.get("weights") is None
        compare_sizes(self, batch, self.data_sizes(), free)


def compare_sizes(module: LightningModule, batch: Any, expected: DataSizes, vocab_is_free: bool = False) -> None:
    """Compare images and token ids of a batch with what networks can take.

    The command line sets such sizes of the module from the data's. From Python they can differ, which would end in an
    IndexError of an embedding, or in an error of the library that a network is from. The ids that can come are known by
    the data's tokenizer; without one, those of the batch are looked at, for which the host waits for the GPU.

    Args:
        module: the module, whose trainer has the data.
        batch: a dict, as all batches of this package are; anything else is not looked at.
        expected: what the networks can take.
        vocab_is_free: whether the module may have another vocabulary, for the message.

    Raises:
        ValueError: if something does not fit.
    """
    if not isinstance(batch, Mapping):
        return
    for name, value in batch.items():
        if name.startswith("image") and isinstance(value, Tensor) and value.ndim == 4:
            _compare_images(tuple(value.shape[2:]), expected.image_size)
        if name.endswith("input_ids") and isinstance(value, Tensor) and value.numel():
            _compare_tokens(module, value, expected, vocab_is_free)


def _compare_tokens(module: LightningModule, ids: Tensor, expected: DataSizes, vocab_is_free: bool) -> None:
    tokenizer: Any = getattr(datamodule_of(module), "tokenizer", None)
    entries = len(tokenizer) if hasattr(tokenizer, "__len__") else int(ids.max()) + 1
    if expected.vocab_size is not None and entries > expected.vocab_size:
        own = f"set the model's vocab_size to {entries}, or " if vocab_is_free else ""
        raise ValueError(
            f"Found token ids up to {entries - 1} in the data, expected less than {expected.vocab_size}, the "
            f"model's vocabulary: {own}give the data a tokenizer of at most {expected.vocab_size} entries."
        )
    if expected.max_tokens is not None and ids.shape[1] > expected.max_tokens:
        raise ValueError(
            f"Found texts of {ids.shape[1]} tokens in the data, expected at most {expected.max_tokens}, the "
            "positions of the model: set the data's max_tokens to that."
        )


def _compare_images(found: tuple[int, ...], side: int | None) -> None:
    if side is None or found == (side, side):
        return
    shown, also = " x ".join(map(str, found)), ""
    if found[0] == found[1]:
        also = f", or the model's to {found[0]} if it can be made for such images"
    raise ValueError(
        f"Found images of {shown} pixels in the data, expected {side} x {side}: set the data's image_size to "
        f"{side}{also}."
    )
