"""The datamodule that the others stand on: splits, loaders, run seed, state."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ...common.checked_loading import CheckedLoading
from ..transforms.albef import preprocessing_of
from .decode import Account, BadSample
from .loaders import BatchLoader, PredictionLoader, inner_loader
from .samples import Collated, Outcome, Reader, TrainingSet
from .sampling import TrainingBatchSampler, TrainingPosition, evaluation_batches

Split = Literal["train", "validation", "test", "predict"]
_SPLITS: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "validation", "test", "predict"),
}


def splits_of(stage: str | None) -> tuple[Split, ...]:
    """The splits that a stage reads; None reads all."""
    return _SPLITS[stage]


class ImageDataModule(CheckedLoading, pl.LightningDataModule):
    """Images with what goes with them, in batches of the project's contract (dicts of tensors).

    Sample order is a function of (seed, epoch), every draw for a sample of (seed, epoch, row): a run that is resumed
    reads what the run that was never stopped would have read, whatever the number of loader workers. Evaluation
    reads each image once over all processes, without padding.

    A subclass says what the rows are and how they become samples and batches, in the methods of the first section.

    Args:
        batch_size: training rows per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process, 0 to load in the process itself.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: copy batches to page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order, augmentation and caption choice; by default Lightning's global seed, or 0 without
            one. The value in a checkpoint wins when a run is resumed.
        train_transform: RGB image to float [3, H, W], for training; None asks :meth:`default_train_transform`.
        eval_transform: RGB image to float [3, H, W], for evaluation and prediction; None asks
            :meth:`default_eval_transform`.
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        persistent_workers: bool,
        pin_memory: bool | None,
        seed: int | None,
        train_transform: nn.Module | None,
        eval_transform: nn.Module | None,
        max_bad_share: float,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size or 1, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed or 0, 0),
        ):
            if value < least:
                raise ValueError(f"found {name}={value}, expected at least {least}: raise it")
        if (seed or 0) >= 2**32:
            raise ValueError(f"found seed={seed}, expected a number below 2**32: lower it")
        if not 0 <= max_bad_share <= 1:
            raise ValueError(f"found max_bad_share={max_bad_share}, expected a share from 0 to 1: correct it")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self._train_transform = train_transform
        self._eval_transform = eval_transform
        self.max_bad_share = max_bad_share
        self._seed = seed
        self._rows: dict[Split, Any] = {}
        self._accounts: dict[Split, Account] = {}
        self._loaders: weakref.WeakSet[BatchLoader] = weakref.WeakSet()

    # What a subclass supplies

    def open_split(self, split: Split) -> Any:
        """The rows of a split, or None where it was not asked for."""
        raise NotImplementedError

    def training_reader(self, rows: Any) -> Reader:
        """What makes a training sample of a row."""
        raise NotImplementedError

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """What makes a training batch of samples."""
        raise NotImplementedError

    def default_train_transform(self) -> nn.Module:
        """The training transform where none was given."""
        raise NotImplementedError

    def default_eval_transform(self) -> nn.Module:
        """The evaluation transform where none was given."""
        raise NotImplementedError

    def evaluation_items(self, rows: Any) -> Sequence[Any]:
        """What an evaluation counts: the rows, or groups of rows."""
        return range(len(rows))

    def evaluation_set(self, rows: Any, items: Any, split: Split) -> Dataset[Outcome]:
        """Makes an evaluation sample of an item."""
        raise NotImplementedError

    def evaluation_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """What makes an evaluation batch of samples."""
        raise NotImplementedError

    # Lightning's hooks

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and fail here where one of them cannot be used."""
        for split in splits_of(stage):
            if split not in self._rows and (rows := self.open_split(split)) is not None:
                self._rows[split] = rows
        needed = splits_of(stage)[0]
        instead, others = self._can_predict() if needed == "predict" else (False, "")
        if stage is not None and needed not in self._rows and not instead:
            command = TrainerFn(stage).value  # the member itself prints as TrainerFn.TESTING
            raise ValueError(
                f"found no source for {needed!r}, which {command!r} needs, expected one: set data.{needed}{others}"
            )

    def train_dataloader(self) -> BatchLoader:
        """Batches of this process from where the trainer stands."""
        rows = self._opened("train")
        total = self._epoch_rows()
        replicas, _ = self.replicas()
        length = total // (self.batch_size * replicas)
        if not length:
            raise ValueError(
                f"found {total} training rows an epoch, expected at least one global batch of "
                f"{self.batch_size * replicas} ({replicas} process(es) of batch_size {self.batch_size}): "
                "lower batch_size or use more data"
            )
        position = TrainingPosition(self.trainer, length)

        # Made at the first batch: some strategies restore the seed and the tokenizer after the loader is asked for.
        def make() -> DataLoader[Any]:
            return self._training_loader(rows, length, position)

        keep = self._keeps_workers(rows)
        loader = BatchLoader(make, length, self.account("train"), keep=keep, started=lambda: position.done)
        return self._remember(loader)

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Each validation image once; an empty list without a validation split."""
        return self._evaluation_loader("validation") if "validation" in self._rows else []

    def test_dataloader(self) -> BatchLoader:
        """Each test image once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Each image of the ``predict`` source once."""
        return self._evaluation_loader("predict")

    def teardown(self, stage: str | None = None) -> None:
        """Stop the loader workers."""
        for loader in list(self._loaders):
            loader.close()
        self._loaders.clear()

    def on_exception(self, exception: BaseException) -> None:
        """Stop the loader workers of a run that failed; they would live on as long as its traceback does."""
        self.teardown()

    def state_dict(self) -> dict[str, Any]:
        """The run's seed, what the batch counter counts, and what evaluation does to an image."""
        return {
            "seed": self.run_seed,
            "global_batch_size": self.batch_size * self.replicas()[0],
            "rows": self._epoch_rows() if "train" in self._rows else None,
            "preprocessing": self.preprocessing,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's seed."""
        seed = state_dict["seed"]
        if seed != self.run_seed:
            rank_zero_warn(
                f"the data seed {self.run_seed} gives way to the checkpoint's, {seed}, so that the run continues"
            )
        self._seed = seed
        self._warn_of_change(state_dict)

    def _warn_of_change(self, state: dict[str, Any]) -> None:
        if "train" not in self._rows:
            return
        now = self.batch_size * self.replicas()[0], self._epoch_rows()
        then = state.get("global_batch_size"), state.get("rows")
        if now != then:
            rank_zero_warn(
                f"the checkpoint's run had a global batch of {then[0]} from {then[1]} training rows, this one has "
                f"{now[0]} from {now[1]}: the sample order is not continued exactly"
            )

    # What callbacks and exports ask for

    @property
    def train_transform(self) -> nn.Module:
        """RGB image to float [3, H, W], for training."""
        return self.default_train_transform() if self._train_transform is None else self._train_transform

    @train_transform.setter
    def train_transform(self, transform: nn.Module) -> None:
        self._train_transform = transform

    @property
    def eval_transform(self) -> nn.Module:
        """RGB image to float [3, H, W], for evaluation and prediction."""
        return self.default_eval_transform() if self._eval_transform is None else self._eval_transform

    @eval_transform.setter
    def eval_transform(self, transform: nn.Module) -> None:
        self._eval_transform = transform

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """What evaluation does to an image, plain data; None where no images are read."""
        return preprocessing_of(self.eval_transform)

    def expected_preprocessing(self) -> dict[str, Any]:
        """What the trainer's module expects to be done with an image, as far as it knows; nothing without one."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        ask = getattr(module, "expected_preprocessing", None)
        expected: dict[str, Any] = ask() if callable(ask) else {}
        if "transform" in expected:
            rank_zero_warn(
                f"the weights were evaluated with the transform {expected['transform']}, which is no part of a "
                "checkpoint: give it as data.eval_transform, or these images are prepared in another way"
            )
        return expected

    def image(self, split: Split, sample_index: int) -> Image.Image:
        """An image as evaluation reads it before the transform: decoded, RGB, the right way up.

        Args:
            split: one that is set up.
            sample_index: its number in the batches.

        Raises:
            ValueError: the split is not set up or is streamed, or the image cannot be used.
        """
        rows = self._opened(split)
        if not hasattr(rows, "image"):
            raise ValueError(
                f"found {split!r} to be streamed, expected a split whose images can be read in any order: set "
                "data.streaming to false"
            )
        try:
            image: Image.Image = rows.image(sample_index)
            return image
        except BadSample as bad:
            raise ValueError(
                f"found an unusable image, {bad.fault.name} ({bad.fault.cause}), expected one that is in a batch: "
                "mend it"
            ) from None

    def picture_name(self, split: Split, sample_index: int) -> str:
        """The path of an image where it is a file, else its source and row.

        Args:
            split: one that is set up.
            sample_index: its number in the batches.

        Raises:
            ValueError: the split is not set up.
        """
        name: str = self._opened(split).picture_name(sample_index)
        return name

    # Shared parts

    @property
    def run_seed(self) -> int:
        """The seed of sample order, augmentation and caption choice."""
        if self._seed is None:
            self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return self._seed

    def account(self, split: Split) -> Account:
        """The count of a split's unusable samples."""
        if split not in self._accounts:
            action = "replaced" if split == "train" else "left out"
            self._accounts[split] = Account(split, self.max_bad_share, action)
        return self._accounts[split]

    def replicas(self) -> tuple[int, int]:
        """How many processes read different data, and which of them this is.

        (Not always the world size: processes that share one model by tensor parallelism read the same data.)
        """
        if self.trainer is not None:
            known = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            return known["num_replicas"], known["rank"]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
        return 1, 0

    def _opened(self, split: Split) -> Any:
        if split not in self._rows:
            raise ValueError(f"found no {split!r} rows, expected setup() to have opened them: set data.{split}")
        return self._rows[split]

    def _epoch_rows(self) -> int:
        return len(self._opened("train"))

    def _can_predict(self) -> tuple[bool, str]:
        """Whether there is something to predict beside images, and how a message names the option."""
        return False, ""

    def _keeps_workers(self, rows: Any) -> bool:
        """Whether one inner loader serves all passes over the training rows."""
        return True

    def _training_loader(self, rows: Any, length: int, position: TrainingPosition) -> DataLoader[Any]:
        replicas, rank = self.replicas()
        sampler = TrainingBatchSampler(len(rows), self.batch_size, self.run_seed, rank, replicas, position)
        dataset = TrainingSet(len(rows), self.training_reader(rows), self.run_seed)
        persistent = self.persistent_workers and self.num_workers > 0
        return self._inner(dataset, self.training_collate(), batch_sampler=sampler, persistent_workers=persistent)

    def _evaluation_loader(self, split: Split) -> BatchLoader:
        rows = self._opened(split)
        items = self.evaluation_items(rows)
        replicas, rank = self.replicas()
        batches = evaluation_batches(len(items), self.eval_batch_size, rank, replicas)

        def make(batch_sampler: Any = batches) -> DataLoader[Any]:
            dataset = self.evaluation_set(rows, items, split)
            return self._inner(dataset, self.evaluation_collate(), batch_sampler=batch_sampler)

        account, alone = self.account(split), replicas == 1
        if split == "predict":
            return self._remember(PredictionLoader(batches, make, account, skip_empty=alone))
        return self._remember(BatchLoader(make, len(batches), account, keep=False, skip_empty=alone))

    def _inner(self, dataset: Any, collate: Any, workers: int | None = None, **options: Any) -> DataLoader[Any]:
        workers = self.num_workers if workers is None else workers
        return inner_loader(dataset, collate, workers, pin_memory=self._pins(), **options)

    def _remember(self, loader: BatchLoader) -> BatchLoader:
        self._loaders.add(loader)
        return loader

    def _pins(self) -> bool:
        if self.pin_memory is not None:
            return self.pin_memory
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _record_hyperparameters(self) -> None:
        """Put the constructor's arguments into checkpoints, as far as they are plain data; called by the constructor.

        A checkpoint with a module or a dataclass in it could not be read back under ``weights_only=True``. (Under the
        command line Lightning records the configuration instead of the arguments, so that transforms stay in, by name.)
        """
        frame = inspect.currentframe()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`")
            self.save_hyperparameters(logger=False, frame=frame.f_back if frame is not None else None)
        plain = {name: _plain(value) for name, value in self.hparams.items()}
        self.hparams.clear()
        self.hparams.update({name: value for name, value in plain.items() if value is not _NOT_PLAIN})
        self._hparams_initial = copy.deepcopy(self.hparams)


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Namespace):
        value = value.as_dict()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        entries = {key: _plain(part) for key, part in value.items()}
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in entries.values()) else entries
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts) else parts
    return _NOT_PLAIN
