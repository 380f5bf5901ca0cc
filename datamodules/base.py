"""The datamodule that the others stand on: loaders, collation, tokenizer, run seed, state."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from .decode import Account, BadSample
from .loaders import BatchLoader, PredictionLoader, inner_loader
from .records import read_texts
from .samples import EvaluationCollate, EvaluationSet, Table, TextCollate, TrainingCollate, TrainingSet
from .sampling import TrainingBatchSampler, TrainingPosition, evaluation_batches
from .streaming import Stream, StreamedEvaluationSet, StreamedTrainingSet
from .text import (
    TextEncoder,
    open_tokenizer,
    set_ending,
    tokenizer_digest,
    tokenizer_from_json,
    train_wordpiece,
    usable_caption,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

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


class PairDataModule(pl.LightningDataModule):
    """Pictures with captions, in batches of the project's contract (dicts of tensors).

    Sample order is a function of (seed, epoch), augmentation and caption choice of (seed, epoch, row): a run that is
    resumed reads what the run that was never stopped would have read, whatever the number of loader workers. Evaluation
    reads each picture once over all processes, without padding.

    A subclass says what the rows are, in :meth:`open_split`.

    Args:
        batch_size: training rows per process and batch.
        eval_batch_size: pictures per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process, 0 to load in the process itself.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: copy batches to page-locked memory; by default where the trainer uses CUDA.
        seed: of sample order, augmentation and caption choice; by default Lightning's global seed, or 0 without one.
            The value in a checkpoint wins when a run is resumed.
        train_transform: RGB picture to float [3, H, W], for training.
        eval_transform: the same for evaluation and prediction.
        tokenizer: hub name, local folder, BERT ``vocab.txt`` or ``tokenizer.json``; by default a WordPiece tokenizer is
            trained on the training captions, and travels in the checkpoint.
        vocab_size: largest number of entries a tokenizer may have; the number a trained one is given at most.
        max_tokens: longest token sequence, special tokens included (ALBEF: 25).
        append_sep: end sequences with [SEP], as BERT does; the ALBEF authors do not.
        clean_captions: apply ALBEF's caption cleaning.
        max_words: words kept by the cleaning (ALBEF: 30).
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
        predict_texts: texts for prediction, or a text file with one a line.
    """

    # Read by a stream only.
    samples_per_epoch: int | None = None
    shuffle_block: int = 1024

    def __init__(
        self,
        *,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        persistent_workers: bool,
        pin_memory: bool | None,
        seed: int | None,
        train_transform: nn.Module,
        eval_transform: nn.Module,
        tokenizer: str | None,
        vocab_size: int,
        max_tokens: int,
        append_sep: bool,
        clean_captions: bool,
        max_words: int,
        max_bad_share: float,
        predict_texts: str | list[str] | None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size or 1, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed or 0, 0),
            ("max_tokens", max_tokens, 3),
            ("max_words", max_words, 1),
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
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.append_sep = append_sep
        self.clean_captions = clean_captions
        self.max_words = max_words
        self.max_bad_share = max_bad_share
        self._predict_texts = predict_texts
        self._texts: list[str] | None = None
        self._seed = seed
        self._tokenizer_name = tokenizer
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._trained: str | None = None
        self._rows: dict[Split, Table | Stream] = {}
        self._accounts: dict[Split, Account] = {}
        self._loaders: weakref.WeakSet[BatchLoader] = weakref.WeakSet()

    # What a subclass supplies

    def open_split(self, split: Split) -> Table | Stream | None:
        """The rows of a split, or None where it was not asked for."""
        raise NotImplementedError

    # Lightning's hooks

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and fail here where one of them cannot be used."""
        for split in splits_of(stage):
            if split not in self._rows and (rows := self.open_split(split)) is not None:
                self._rows[split] = rows
        if "predict" in splits_of(stage):
            self._check_texts()
        needed = splits_of(stage)[0]
        if stage is not None and needed not in self._rows and not (needed == "predict" and self.predict_texts):
            command = TrainerFn(stage).value  # the member itself prints as TrainerFn.TESTING
            texts = " or data.predict_texts, or both" if needed == "predict" else ""
            raise ValueError(
                f"found no source for {needed!r}, which {command!r} needs, expected one: set data.{needed}{texts}"
            )

    def train_dataloader(self) -> BatchLoader:
        """Batches of this process from where the trainer stands."""
        rows = self._opened("train")
        total = self._epoch_rows()
        replicas, rank = self.replicas()
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
            encoder = self.encoder()
            if isinstance(rows, Stream):
                streamed = StreamedTrainingSet(
                    rows,
                    self.train_transform,
                    encoder,
                    self.run_seed,
                    self.batch_size,
                    length,
                    self.shuffle_block,
                    (replicas, rank),
                    position(),
                )
                return self._inner(streamed, TrainingCollate(encoder), batch_size=None)
            sampler = TrainingBatchSampler(len(rows), self.batch_size, self.run_seed, rank, replicas, position)
            dataset = TrainingSet(rows, self.train_transform, encoder, self.run_seed)
            persistent = self.persistent_workers and self.num_workers > 0
            return self._inner(dataset, TrainingCollate(encoder), batch_sampler=sampler, persistent_workers=persistent)

        # A stream's workers learn the position when they start, so each pass gets new ones.
        keep = not isinstance(rows, Stream)
        loader = BatchLoader(make, length, self.account("train"), keep=keep, started=lambda: position.done)
        return self._remember(loader)

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Each validation picture once; an empty list without a validation split."""
        return self._evaluation_loader("validation") if "validation" in self._rows else []

    def test_dataloader(self) -> BatchLoader:
        """Each test picture once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Each picture of the ``predict`` source once, with its captions where there are any; each text once; or both.

        Batches of texts hold ``input_ids``, ``attention_mask`` and ``text_index``, the place in ``predict_texts``.
        """
        if not self.predict_texts:
            return self._evaluation_loader("predict")
        texts = self._text_loader()
        return [self._evaluation_loader("predict"), texts] if "predict" in self._rows else texts

    def teardown(self, stage: str | None = None) -> None:
        """Stop the loader workers."""
        for loader in list(self._loaders):
            loader.close()
        self._loaders.clear()

    def on_exception(self, exception: BaseException) -> None:
        """Stop the loader workers of a run that failed; they would live on as long as its traceback does."""
        self.teardown()

    def state_dict(self) -> dict[str, Any]:
        """The run's seed, the trained tokenizer if there is one, and what the batch counter counts."""
        return {
            "seed": self.run_seed,
            "tokenizer": self._trained,
            "global_batch_size": self.batch_size * self.replicas()[0],
            "rows": self._epoch_rows() if "train" in self._rows else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's seed and trained tokenizer."""
        seed = state_dict["seed"]
        if seed != self.run_seed:
            rank_zero_warn(
                f"the data seed {self.run_seed} gives way to the checkpoint's, {seed}, so that the run continues"
            )
        self._seed = seed
        tokenizer = state_dict.get("tokenizer")
        if tokenizer is not None and self._tokenizer_name is not None:
            rank_zero_warn(
                f"the checkpoint was trained with a tokenizer of its own ({tokenizer_digest(tokenizer)}), "
                f"now {self._tokenizer_name!r} is used: token ids will not mean the same"
            )
        elif tokenizer is not None:
            self._trained = tokenizer
            self._tokenizer = None
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

    # What callbacks ask for

    def picture(self, split: Split, sample_index: int) -> Image.Image:
        """A picture as evaluation reads it before the transform: decoded, RGB, the right way up.

        Args:
            split: one that is set up.
            sample_index: its number in the batches.

        Raises:
            ValueError: the split is not set up or is streamed, or the picture cannot be used.
        """
        rows = self._opened(split)
        if isinstance(rows, Stream):
            raise ValueError(
                f"found {split!r} to be streamed, expected a split whose pictures can be read in any order: set "
                "data.streaming to false"
            )
        try:
            return rows.picture(sample_index)
        except BadSample as bad:
            raise ValueError(
                f"found an unusable picture, {bad.fault.name} ({bad.fault.cause}), expected one that is in a batch: "
                "mend it"
            ) from None

    def picture_name(self, split: Split, sample_index: int) -> str:
        """The path of a picture where it is a file, else its source and row.

        Args:
            split: one that is set up.
            sample_index: its number in the batches.

        Raises:
            ValueError: the split is not set up.
        """
        return self._opened(split).picture_name(sample_index)

    @property
    def predict_texts(self) -> list[str]:
        """The texts to predict, by ``text_index``. Those without content are in no batch."""
        if self._texts is None:
            given = self._predict_texts
            self._texts = read_texts(given) if isinstance(given, str) else list(given or ())
        return self._texts

    # Shared parts

    @property
    def run_seed(self) -> int:
        """The seed of sample order, augmentation and caption choice."""
        if self._seed is None:
            self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return self._seed

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer; trained on the training captions at first use where none was given or restored."""
        if self._tokenizer is None:
            if self._tokenizer_name is not None:
                tokenizer = open_tokenizer(self._tokenizer_name)
            else:
                if self._trained is None:
                    self._trained = self._tokenizer_of_checkpoint() or self._train_tokenizer()
                tokenizer = tokenizer_from_json(self._trained)
            if len(tokenizer) > self.vocab_size:
                raise ValueError(
                    f"found {len(tokenizer)} entries in the tokenizer {self._tokenizer_name or 'of the checkpoint'!r}, "
                    f"expected at most vocab_size={self.vocab_size}: raise vocab_size, of model and data alike"
                )
            set_ending(tokenizer, self.append_sep)
            self._tokenizer = tokenizer
        return self._tokenizer

    @property
    def special_token_ids(self) -> dict[str, int | None]:
        """Ids of ``pad``, ``cls``, ``sep`` and ``mask``; None where the tokenizer has no such token."""
        tokenizer = self.tokenizer
        return {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep", "mask")}

    def _tokenizer_of_checkpoint(self) -> str | None:
        """The trained tokenizer in the checkpoint that the trainer has loaded, whatever datamodule trained it.

        Lightning hands a datamodule the state of its own class only; but a model that was trained on drawn shapes knows
        its own token ids, whatever pictures it is shown.
        """
        path = Path(getattr(self.trainer, "ckpt_path", None) or "")
        file = path / "meta.pt" if path.is_dir() else path  # a sharded checkpoint is a folder
        if not file.is_file():
            return None
        states = torch.load(file, map_location="cpu", weights_only=True, mmap=True).values()
        found = (state.get("tokenizer") for state in states if isinstance(state, Mapping))
        return next((tokenizer for tokenizer in found if isinstance(tokenizer, str)), None)

    def _train_tokenizer(self) -> str:
        if "train" not in self._rows and (rows := self.open_split("train")) is not None:
            self._rows["train"] = rows
        if "train" not in self._rows:
            raise ValueError(
                "found neither a tokenizer nor training captions to train one on: give data.tokenizer, data.train, or "
                "the checkpoint of the run that trained it"
            )
        trained = train_wordpiece(self._rows["train"].texts(), self.vocab_size)
        log.info("trained a WordPiece tokenizer on the training captions (%s)", tokenizer_digest(trained))
        return trained

    def encoder(self) -> TextEncoder:
        """What turns captions into token ids."""
        return TextEncoder(self.tokenizer, self.max_tokens, self.clean_captions, self.max_words)

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

    def _opened(self, split: Split) -> Table | Stream:
        if split not in self._rows:
            raise ValueError(f"found no {split!r} rows, expected setup() to have opened them: set data.{split}")
        return self._rows[split]

    def _epoch_rows(self) -> int:
        rows = self._opened("train")
        return (self.samples_per_epoch or 0) if isinstance(rows, Stream) else len(rows)

    def _evaluation_loader(self, split: Split) -> BatchLoader:
        rows = self._opened(split)
        replicas, rank = self.replicas()
        account = self.account(split)
        need_captions = split != "predict"
        alone = replicas == 1
        if isinstance(rows, Stream):

            def make_stream() -> DataLoader[Any]:
                encoder = self.encoder()
                dataset = StreamedEvaluationSet(
                    rows,
                    self.eval_transform,
                    encoder,
                    self.run_seed,
                    self.eval_batch_size,
                    (replicas, rank),
                    need_captions,
                )
                # More workers would each read everything.
                workers = min(self.num_workers, 1)
                return self._inner(dataset, EvaluationCollate(encoder, self.eval_transform), workers, batch_size=None)

            return self._remember(BatchLoader(make_stream, None, account, keep=False, skip_empty=alone))

        pictures = rows.pictures()
        batches = evaluation_batches(len(pictures), self.eval_batch_size, rank, replicas)

        def make(batch_sampler: Any = batches) -> DataLoader[Any]:
            encoder = self.encoder()
            dataset = EvaluationSet(rows, pictures, self.eval_transform, encoder, self.run_seed, need_captions)
            collate = EvaluationCollate(encoder, self.eval_transform)
            return self._inner(dataset, collate, batch_sampler=batch_sampler)

        if split == "predict":
            return self._remember(PredictionLoader(batches, make, account, skip_empty=alone))
        return self._remember(BatchLoader(make, len(batches), account, keep=False, skip_empty=alone))

    def _usable_texts(self) -> dict[int, tuple[int, str]]:
        """By their place in the list, the texts of which something is left to encode, each with its place."""
        texts = enumerate(self.predict_texts)
        return {pair[0]: pair for pair in texts if usable_caption(pair[1], self.clean_captions, self.max_words)}

    def _check_texts(self) -> None:
        """Fail where texts were given but none of them has content, and say how many have none."""
        if self._predict_texts is None:
            return
        total, usable = len(self.predict_texts), len(self._usable_texts())
        if not usable:
            origin = f" in {self._predict_texts!r}" if isinstance(self._predict_texts, str) else ""
            raise ValueError(
                f"found {total} text(s){origin} and content in none of them, expected some: give a text file with one "
                "text a line, or a list of texts, as data.predict_texts"
            )
        if usable < total:
            rank_zero_info(f"{total - usable} of the {total} texts to predict are empty and left out.")

    def _text_loader(self) -> BatchLoader:
        texts = self._usable_texts()
        places = list(texts)
        replicas, rank = self.replicas()
        shares = evaluation_batches(len(places), self.eval_batch_size, rank, replicas)
        batches = [[places[item] for item in share] for share in shares]

        def make(batch_sampler: Any) -> DataLoader[Any]:
            # No workers: there is nothing to decode.
            return self._inner(texts, TextCollate(self.encoder()), workers=0, batch_sampler=batch_sampler)

        account = Account("predict", self.max_bad_share)  # its own, or texts would dilute the share of bad pictures
        return self._remember(PredictionLoader(batches, make, account, skip_empty=False))

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
