"""Base of all datamodules: loaders, seed, state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ...common.checked_loading import CheckedLoading
from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range
from .contract import asked_of
from .decode import Decoder, check_decoder
from .eval_rows import check_limit, drawn_evenly, evaluated_items, remark_on_labels
from .faults import Account, BadSample, Batch, Collated, Outcome
from .hyperparameters import RecordedArguments, check_one_batch_size, record_hyperparameters
from .loaders import BatchLoader, PredictionLoader, inner_loader, replicas_of
from .mixing import Mix, tempered
from .samples import Reader, TrainingSet
from .sampling import (
    TrainingBatchSampler,
    TrainingPosition,
    batches_per_epoch,
    compare_order,
    evaluation_batches,
    share_of_batch,
)
from .stages import Split, splits_of


class SampledDataModule(RecordedArguments, CheckedLoading, pl.LightningDataModule, option="data"):
    """Base of all datamodules, which provides rows in batches of the project's contract (dicts of tensors).

    The order of samples is a function of (seed, epoch), and each random draw for a sample is a function of (seed,
    epoch, row): a resumed run reads the same samples as an uninterrupted run, with any number of loader workers.
    Evaluation reads each item exactly once over all processes, without padding.

    A subclass defines the rows, samples and batches in the methods of the first section. It passes the arguments below
    on as `**options`, and declares one of them only to change its default.

    Args:
        batch_size: training rows per process and batch.
        global_batch_size: training rows per batch of all processes together, in place of `batch_size`: a recipe keeps
            its batch, and with it its learning rate, on any number of processes that divides it.
        eval_batch_size: images per process and evaluation batch; by default `batch_size`.
        limit_eval_rows: number of images (texts or rows, where these are evaluated) that validation and test read, or
            their share, a float up to 1.0; always the same ones, evenly spaced, of each class in proportion where there
            are labels. By default all.
        num_workers: loader workers per process; with 0 the process itself loads the data.
        persistent_workers: whether to keep the training workers between epochs.
        pin_memory: whether to copy batches to page-locked memory; by default True if the trainer uses CUDA.
        seed: seed of sample order, augmentation and caption choice; by default Lightning's global seed, or 0 without
            one. When a run is resumed, the seed of the checkpoint is used.
        max_bad_share: largest share of unusable samples among the samples read so far with which the run continues.
        decoder: decoder of JPEG and WebP files without transparency. "torchcodec" needs the extra of this name;
            its pixels are those of "pillow", which decodes all other images.
        mixing_temperature: T of several training sources, whose shares of an epoch are proportional to n^(1/T), n being
            their numbers of rows; 1 keeps the proportions.
    """

    asks: ClassVar[tuple[type, ...]] = ()
    """Protocols of the module that this class reads (`contract`), beside those of its base classes."""

    def __init__(
        self,
        *,
        batch_size: Annotated[int, COUNT] = 64,
        global_batch_size: Annotated[int | None, COUNT] = None,
        eval_batch_size: Annotated[int | None, COUNT] = None,
        limit_eval_rows: Annotated[int | float | None, POSITIVE] = None,
        num_workers: Annotated[int, NOT_NEGATIVE] = 2,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: Annotated[int | None, SEED] = None,
        max_bad_share: Annotated[float, SHARE] = 0.05,
        decoder: Decoder = "pillow",
        mixing_temperature: Annotated[float, Range(least=1, infinity=True)] = 1.0,
    ) -> None:
        super().__init__()
        record_hyperparameters(self, self.arguments)
        del self.arguments  # they may hold secrets of URLs
        check_one_batch_size(type(self), batch_size, global_batch_size)
        check_limit(limit_eval_rows)
        check_decoder(decoder)
        self.batch_size = global_batch_size or batch_size  # of one process; `setup` divides it
        self.global_batch_size = global_batch_size
        self._eval_batch_size = eval_batch_size
        self.limit_eval_rows = limit_eval_rows
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self.max_bad_share = max_bad_share
        self.decoder = decoder
        self.mixing_temperature = mixing_temperature
        self._seed = seed
        self._rows: dict[Split, Any] = {}
        self._by_process: list[str] = []
        self._accounts: dict[Split, Account] = {}
        self._loaders: weakref.WeakSet[BatchLoader] = weakref.WeakSet()

    # Methods that a subclass defines

    def open_split(self, split: Split) -> Any:
        """Open the rows of a split; return None if it has no source."""
        raise NotImplementedError

    def open_sources(self, split: Split) -> Sequence[Any]:
        """Open the sources of a split, and convert files that have no memory-mapped copy; by default there are none."""
        return ()

    def training_reader(self, rows: Any) -> Reader:
        """Return the reader of training samples."""
        raise NotImplementedError

    def training_mix(self, rows: Any) -> Mix:
        """Return how often an epoch reads the rows of each source: `mix` of the rows, or without it each row once."""
        mix: Mix | None = getattr(rows, "mix", None)
        return Mix([len(rows)]) if mix is None else mix

    def epoch_mix(self, rows: Any) -> Mix:
        """Return the mix of an epoch: `training_mix` with the shares that `mixing_temperature` gives to the sources.

        Raises:
            UserError: If the sources and `mixing_temperature` do not fit together.
        """
        return tempered(self.training_mix(rows), self.mixing_temperature)

    def training_set(self, rows: Any) -> TrainingSet:
        """Return the dataset of training samples."""
        return TrainingSet(len(rows), self.training_reader(rows), self.run_seed)

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """Return the function that collates samples to a training batch."""
        raise NotImplementedError

    def evaluation_items(self, rows: Any) -> Sequence[Any]:
        """Return the items that an evaluation reads: rows or groups of rows."""
        return range(len(rows))

    def evaluation_labels(self, rows: Any) -> Sequence[int] | None:
        """Return the class index of each evaluation item, -1 for an unreadable one; None if there are no classes."""
        return None

    def evaluation_set(self, rows: Any, items: Any, split: Split) -> Dataset[Outcome]:
        """Return the dataset of evaluation samples, one per item."""
        raise NotImplementedError

    def evaluation_collate(self, split: Split) -> Callable[[Sequence[Outcome]], Collated]:
        """Return the function that collates samples to an evaluation batch."""
        raise NotImplementedError

    # Lightning's hooks

    def prepare_data(self) -> None:
        """Convert the files once per node, so that the other processes find the memory-mapped copies."""
        for split in self.splits_to_prepare():
            self.open_sources(split)

    def setup(self, stage: str | None = None) -> None:
        """Check the contract with the module, divide the global batch, and open the splits of a stage.

        Raises:
            UserError: If a split cannot be used, the module violates the contract, or the processes do not divide the
                global batch.
        """
        if self.global_batch_size is not None:
            self.batch_size = share_of_batch(self.global_batch_size, self.replicas()[0])
        for protocol in (protocol for cls in type(self).__mro__ for protocol in vars(cls).get("asks", ())):
            asked_of(self.trainer, protocol)
        for split in splits_of(stage):
            if split not in self._rows and (rows := self.open_split(split)) is not None:
                self._rows[split] = rows
                if split == "train" and self.mixing_temperature != 1:
                    self.epoch_mix(rows)  # raises an error before training
        needed = splits_of(stage)[0]
        can_predict, alternatives = self._can_predict() if needed == "predict" else (False, "")
        if stage is not None and needed not in self._rows and not can_predict:
            command = TrainerFn(stage).value  # the member itself would print as TrainerFn.TESTING
            raise UserError(f"Expected a {needed} source for {command!r}, got none: set data.{needed}{alternatives}.")

    def train_dataloader(self) -> BatchLoader:
        """Return the training batches of this process, starting at the trainer's position."""
        rows = self._opened("train")
        length = batches_per_epoch(self.row_loaders.epoch_rows(rows), self.batch_size, self.replicas()[0])
        position = TrainingPosition(self.trainer, length)

        # Called at the first batch, since some strategies restore seed and tokenizer after they request the loader.
        def make() -> DataLoader[Any]:
            return self.row_loaders.training_loader(rows, length, position)

        return self.registered(
            BatchLoader(
                make,
                length,
                self.account("train"),
                keep=self.row_loaders.keeps_workers,
                started=lambda: position.done,
            )
        )

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return the loader of validation, which reads each image once; an empty list without a validation split."""
        return self._evaluation_loader("validation", limited=True) if "validation" in self._rows else []

    def test_dataloader(self) -> BatchLoader:
        """Return the loader of the test split, which reads each image once."""
        return self._evaluation_loader("test", limited=True)

    def predict_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return the loader of the `predict` source, which reads each image once."""
        return self._evaluation_loader("predict")

    def teardown(self, stage: str | None = None) -> None:
        """Stop the loader workers."""
        for loader in list(self._loaders):
            loader.close()
        self._loaders.clear()

    def on_exception(self, exception: BaseException) -> None:
        """Stop the loader workers of a failed run; otherwise they would live as long as the traceback."""
        self.teardown()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the run, and all else that the order of samples depends on."""
        rows = self._rows.get("train")
        processes = self.replicas()[0]
        return {
            "seed": self.run_seed,
            "global_batch_size": self.batch_size * processes,
            "rows": None if rows is None else self.row_loaders.epoch_rows(rows),
            "processes": processes,
            "stream": {} if rows is None else self.row_loaders.stream_settings(rows),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed of a checkpoint, and warn if the order of samples cannot continue exactly.

        Raises:
            UserError: If a stream would have another order, and so read some rows twice and others never.
        """
        seed = state_dict["seed"]
        if seed != self.run_seed:
            rank_zero_warn(
                f"The data seed {self.run_seed} is replaced by {seed} from the checkpoint to continue the run."
            )
        self._seed = seed
        if "train" in self._rows:
            self._by_process = compare_order(state_dict, SampledDataModule.state_dict(self))

    def by_process(self) -> list[str]:
        """Return in clauses what differs from the run of a checkpoint with another number of processes."""
        return self._by_process

    # For callbacks

    def image(self, split: Split, sample_index: int) -> Image.Image:
        """Return the image of a `sample_index` before the evaluation transform: decoded, RGB, upright.

        Raises:
            UserError: If the split is not set up, or is streamed, or the image cannot be used.
        """
        rows = self._opened(split)
        self.row_loaders.check_random_access(split, "images")
        try:
            image: Image.Image = rows.image(sample_index)
            return image
        except BadSample as bad:
            raise UserError(
                f"Expected a usable image, got {bad.fault.name} ({bad.fault.cause}): correct the file."
            ) from None

    def image_name(self, split: Split, sample_index: int) -> str:
        """Return the path of the image of a `sample_index`, or its source and row if the data contains the image.

        Raises:
            UserError: If the split is not set up.
        """
        name: str = self._opened(split).image_name(sample_index)
        return name

    # Methods that subclasses use

    @property
    def row_loaders(self) -> RowLoaders:
        """The loaders of the rows; a subclass that reads rows in another way returns those of a subclass."""
        return RowLoaders(self)

    @property
    def eval_batch_size(self) -> int:
        """Number of images per process and evaluation batch."""
        return self._eval_batch_size or self.batch_size

    @property
    def run_seed(self) -> int:
        """The seed of sample order, augmentation and caption choice."""
        if self._seed is None:
            self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return self._seed

    def account(self, split: Split) -> Account:
        """Return the counts of unusable samples of a split."""
        action = "replaced" if split == "train" else "skipped"
        return self._accounts.setdefault(split, Account(split, self.max_bad_share, action))

    def replicas(self) -> tuple[int, int]:
        """Return the number of processes that read different data, and the index of this one among them."""
        return replicas_of(self.trainer)

    def splits_to_prepare(self) -> tuple[Split, ...]:
        """Return the splits that the trainer is going to read; all splits without a trainer.

        Other splits are not prepared, since the data settings of a checkpoint may name training files that do not exist
        where a prediction runs.
        """
        return splits_of(self.trainer.state.fn if self.trainer is not None else None)

    def opened_rows(self, split: Split) -> Any:
        """Return the rows of a split that is set up; None for another split."""
        return self._rows.get(split)

    def _opened(self, split: Split) -> Any:
        if split not in self._rows:
            raise UserError(f"Expected an open {split} split, got none: set data.{split}, and call setup() first.")
        return self._rows[split]

    def _can_predict(self) -> tuple[bool, str]:
        """Return whether there is other input than images to predict, and the name of its option in messages."""
        return False, ""

    def _evaluation_loader(self, split: Split, limited: bool = False) -> BatchLoader:
        """Return a loader of the items of an evaluation, all of them or those of `limit_eval_rows`."""
        return self.registered(self.row_loaders.evaluation_loader(self._opened(split), split, limited))

    def limited_items(self, split: Split, rows: Any, length: int) -> np.ndarray:
        """Return the items of `limit_eval_rows`, int64 [n]; warn if their labels are unlike those of the split."""
        labels = self.evaluation_labels(rows)
        items = drawn_evenly(length, self.limit_eval_rows, labels)
        if len(items) < length:
            rank_zero_info(f"The {split} reads {len(items)} of {length} items (data.limit_eval_rows).")
        option = {"validation": "limit_val_batches", "test": "limit_test_batches"}[split]
        limit = getattr(self.trainer, option, 1.0)
        if labels is not None and limit and not getattr(self.trainer, "fast_dev_run", False):
            read = evaluated_items(len(items), self.eval_batch_size, self.replicas()[0], limit)
            names: Sequence[str] | None = getattr(self, "class_names", None)
            remark = remark_on_labels(np.asarray(labels, np.int64), items[read], split, names, f"trainer.{option}")
            if remark is not None:
                rank_zero_warn(remark)
        return items

    def torch_loader(self, dataset: Any, collate: Any, workers: int | None = None, **options: Any) -> DataLoader[Any]:
        """Return torch's loader of a dataset, by default with `num_workers`; options are those of `DataLoader`."""
        workers = self.num_workers if workers is None else workers
        if hasattr(dataset, "decoder"):
            dataset.decoder = self.decoder
        pins = self.pin_memory
        if pins is None:
            pins = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return inner_loader(dataset, collate, workers, pin_memory=pins, **options)

    def read_batch(self, batch: Batch, training: bool) -> Batch:
        """Return a batch as its loader yields it."""
        return batch

    def registered(self, loader: BatchLoader) -> BatchLoader:
        """Return a loader whose batches `read_batch` gets, and whose workers stop at the teardown."""
        loader.finish = partial(self.read_batch, training=loader.account.split == "train")
        self._loaders.add(loader)
        return loader


class RowLoaders:
    """Loaders of rows in random access, whose order is a function of (seed, epoch)."""

    keeps_workers = True
    """Whether one inner loader, with its workers, is used for all passes over the training rows."""

    def __init__(self, data: SampledDataModule) -> None:
        self.data = data

    def epoch_rows(self, rows: Any) -> int:
        """Return the number of training rows in an epoch, over all processes."""
        return len(self.data.epoch_mix(rows))

    def stream_settings(self, rows: Any) -> dict[str, Any]:
        """Return by name what the order of a stream depends on; empty for random access."""
        return {}

    def check_random_access(self, split: Split, content: str) -> None:
        """Check that the rows of a split can be read by position, where `content` says what is read, for the message.

        Raises:
            UserError: If they cannot.
        """

    def training_loader(self, rows: Any, length: int, position: TrainingPosition) -> DataLoader[Any]:
        """Return torch's loader of training batches, of which a full epoch has `length`, from a position on."""
        data = self.data
        replicas, rank = data.replicas()
        sampler = TrainingBatchSampler(data.epoch_mix(rows), data.batch_size, data.run_seed, rank, replicas, position)
        return data.torch_loader(
            data.training_set(rows),
            data.training_collate(),
            batch_sampler=sampler,
            persistent_workers=data.persistent_workers and data.num_workers > 0,
        )

    def evaluation_loader(self, rows: Any, split: Split, limited: bool) -> BatchLoader:
        """Return the loader of an evaluation, of all items or, if `limited`, of those of `limit_eval_rows`."""
        data = self.data
        items = data.evaluation_items(rows)
        replicas, rank = data.replicas()
        positions = data.limited_items(split, rows, len(items)) if limited else np.arange(len(items))
        shares = evaluation_batches(len(positions), data.eval_batch_size, rank, replicas)
        batches: list[list[int]] = [positions[share].tolist() for share in shares]

        def make(batch_sampler: Any = batches) -> DataLoader[Any]:
            dataset = data.evaluation_set(rows, items, split)
            return data.torch_loader(dataset, data.evaluation_collate(split), batch_sampler=batch_sampler)

        account = data.account(split)
        skip_empty = replicas == 1
        if split == "predict":
            return PredictionLoader(batches, make, account, skip_empty=skip_empty)
        return BatchLoader(make, len(batches), account, keep=False, skip_empty=skip_empty)
