"""The datamodule over images with captions: tokenizer, texts to predict, streaming."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.utils.data import DataLoader

from .core.base import ImageDataModule, Split, splits_of
from .core.decode import Account
from .core.loaders import BatchLoader, PredictionLoader
from .core.samples import (
    Collated,
    EvaluationCollate,
    EvaluationSet,
    Outcome,
    PairReader,
    PairRows,
    Reader,
    TextCollate,
    TrainingCollate,
)
from .core.sampling import TrainingPosition, evaluation_batches
from .sources.records import read_texts
from .sources.stream import Stream, StreamedEvaluationSet, StreamedTrainingSet
from .text.clip import CLIP, CLIPTextEncoder, CLIPTokenizer
from .text.tokenizers import (
    Encoder,
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


class PairDataModule(ImageDataModule):
    """Images with captions, in batches of the project's contract (dicts of tensors).

    Order and draws are those of :class:`ImageDataModule`. Evaluation reads each image once, with all its captions.
    A subclass says what the rows are, in :meth:`open_split`.

    Args:
        batch_size: training rows per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process, 0 to load in the process itself.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: copy batches to page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order, augmentation and caption choice; by default Lightning's global seed, or 0 without
            one. The value in a checkpoint wins when a run is resumed.
        train_transform: RGB image to float [3, H, W], for training; None for the subclass's own.
        eval_transform: RGB image to float [3, H, W], for evaluation and prediction; None for the subclass's
            own.
        tokenizer: hub name, local folder, BERT ``vocab.txt`` or ``tokenizer.json``, or "clip" for CLIP's own; by
            default a WordPiece tokenizer is trained on the training captions, and travels in the checkpoint.
        vocab_size: largest number of entries a tokenizer may have; a trained one gets at most as many, and the module
            that it is trained for as many as it has.
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
        train_transform: nn.Module | None,
        eval_transform: nn.Module | None,
        tokenizer: str | None,
        vocab_size: int,
        max_tokens: int,
        append_sep: bool,
        clean_captions: bool,
        max_words: int,
        max_bad_share: float,
        predict_texts: str | list[str] | None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=train_transform,
            eval_transform=eval_transform,
            max_bad_share=max_bad_share,
        )
        for name, value, least in (("max_tokens", max_tokens, 3), ("max_words", max_words, 1)):
            if value < least:
                raise ValueError(f"found {name}={value}, expected at least {least}: raise it")
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.append_sep = append_sep
        self.clean_captions = clean_captions
        self.max_words = max_words
        self._predict_texts = predict_texts
        self._texts: list[str] | None = None
        self._tokenizer_name = tokenizer
        self._tokenizer: PreTrainedTokenizerFast | CLIPTokenizer | None = None
        self._trained: str | None = None
        self._fresh: str | None = None  # trained, but a checkpoint's takes its place

    # What the base asks for

    def training_reader(self, rows: PairRows) -> Reader:
        """Reads an augmented image with one of its captions."""
        return PairReader(rows, self.train_transform, self.encoder())

    def captions(self, split: Split, sample_index: Sequence[int]) -> list[list[str]]:
        """The usable captions of evaluated images as they are in the data, in the order in which they are evaluated.

        Args:
            split: one that is set up.
            sample_index: the images' numbers in the batches.

        Raises:
            ValueError: the split is not set up or is streamed.
        """
        rows, usable = self._opened(split), self.encoder().usable
        if isinstance(rows, Stream):
            raise ValueError(
                f"found {split!r} to be streamed, expected a split whose captions can be read in any order: set "
                "data.streaming to false"
            )
        groups = {group[0]: group for group in rows.images()}
        return [
            [text for row in groups[index] for text in rows.captions(row) if usable(text)] for index in sample_index
        ]

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """Stacks images and encodes their captions."""
        return TrainingCollate(self.encoder())

    def evaluation_items(self, rows: PairRows) -> list[list[int]]:
        """The rows of each image."""
        return rows.images()

    def evaluation_set(self, rows: PairRows, items: list[list[int]], split: Split) -> EvaluationSet:
        """Images with all their captions."""
        return EvaluationSet(rows, items, self.eval_transform, self.encoder(), self.run_seed, split != "predict")

    def evaluation_collate(self) -> EvaluationCollate:
        """Stacks images and encodes the captions of all."""
        return EvaluationCollate(self.encoder(), self.eval_transform)

    # Lightning's hooks

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and fail here where one of them cannot be used."""
        super().setup(stage)
        if stage == "fit":
            self._size_vocabulary()
        if "predict" in splits_of(stage):
            self._check_texts()

    def predict_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Each image of the ``predict`` source once, with its captions where there are any; each text once; or both.

        Batches of texts hold ``input_ids``, ``attention_mask`` and ``text_index``, the place in ``predict_texts``.
        """
        if not self.predict_texts:
            return self._evaluation_loader("predict")
        texts = self._text_loader()
        return [self._evaluation_loader("predict"), texts] if "predict" in self._rows else texts

    def state_dict(self) -> dict[str, Any]:
        """The run's seed, the trained tokenizer if there is one, and what the batch counter counts."""
        return super().state_dict() | {"tokenizer": self._trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's seed and trained tokenizer."""
        super().load_state_dict(state_dict)
        tokenizer = state_dict.get("tokenizer")
        if tokenizer is not None and self._tokenizer_name is not None:
            rank_zero_warn(
                f"the checkpoint was trained with a tokenizer of its own ({tokenizer_digest(tokenizer)}), "
                f"now {self._tokenizer_name!r} is used: token ids will not mean the same"
            )
        elif tokenizer is not None:
            self._trained = tokenizer
            self._tokenizer = None

    # What callbacks and the loaders ask for

    @property
    def predict_texts(self) -> list[str]:
        """The texts to predict, by ``text_index``. Those without content are in no batch."""
        if self._texts is None:
            given = self._predict_texts
            self._texts = read_texts(given) if isinstance(given, str) else list(given or ())
        return self._texts

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast | CLIPTokenizer:
        """The tokenizer; trained on the training captions at first use where none was given or restored."""
        if self._tokenizer is None:
            tokenizer: PreTrainedTokenizerFast | CLIPTokenizer
            if self._tokenizer_name == CLIP:
                tokenizer = CLIPTokenizer(self.max_tokens)
            elif self._tokenizer_name is not None:
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
            if not isinstance(tokenizer, CLIPTokenizer):
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
        its own token ids, whatever images it is shown.
        """
        path = Path(getattr(self.trainer, "ckpt_path", None) or "")
        file = path / "meta.pt" if path.is_dir() else path  # a sharded checkpoint is a folder
        if not file.is_file():
            return None
        states = torch.load(file, map_location="cpu", weights_only=True, mmap=True).values()
        found = (state.get("tokenizer") for state in states if isinstance(state, Mapping))
        return next((tokenizer for tokenizer in found if isinstance(tokenizer, str)), None)

    def _size_vocabulary(self) -> None:
        """Tell the trainer's module of the tokenizer that is trained for it, before callbacks copy the module."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        adopt = getattr(module, "adopt_vocabulary", None)
        if callable(adopt) and self._tokenizer_name is None:
            adopt(lambda: len(tokenizer_from_json(self._trained or self._train_tokenizer())))

    def _train_tokenizer(self) -> str:
        if self._fresh is not None:
            return self._fresh
        if "train" not in self._rows and (rows := self.open_split("train")) is not None:
            self._rows["train"] = rows
        if "train" not in self._rows:
            raise ValueError(
                "found neither a tokenizer nor training captions to train one on: give data.tokenizer, data.train, or "
                "the checkpoint of the run that trained it"
            )
        self._fresh = train_wordpiece(self._rows["train"].texts(), self.vocab_size)
        log.info("trained a WordPiece tokenizer on the training captions (%s)", tokenizer_digest(self._fresh))
        return self._fresh

    def encoder(self) -> Encoder:
        """What turns captions into token ids."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, CLIPTokenizer):
            return CLIPTextEncoder(self.max_tokens, self.clean_captions, self.max_words)
        return TextEncoder(tokenizer, self.max_tokens, self.clean_captions, self.max_words)

    # Loaders

    def _can_predict(self) -> tuple[bool, str]:
        return bool(self.predict_texts), " or data.predict_texts, or both"

    def _epoch_rows(self) -> int:
        return (self.samples_per_epoch or 0) if isinstance(self._opened("train"), Stream) else super()._epoch_rows()

    def _keeps_workers(self, rows: Any) -> bool:
        # A stream's workers learn the position when they start, so each pass gets new ones.
        return not isinstance(rows, Stream)

    def _training_loader(self, rows: Any, length: int, position: TrainingPosition) -> DataLoader[Any]:
        if not isinstance(rows, Stream):
            return super()._training_loader(rows, length, position)
        streamed = StreamedTrainingSet(
            rows,
            self.train_transform,
            self.encoder(),
            self.run_seed,
            self.batch_size,
            length,
            self.shuffle_block,
            self.replicas(),
            position(),
        )
        return self._inner(streamed, self.training_collate(), batch_size=None)

    def _evaluation_loader(self, split: Split) -> BatchLoader:
        rows = self._opened(split)
        if not isinstance(rows, Stream):
            return super()._evaluation_loader(split)

        def make() -> DataLoader[Any]:
            dataset = StreamedEvaluationSet(
                rows,
                self.eval_transform,
                self.encoder(),
                self.run_seed,
                self.eval_batch_size,
                self.replicas(),
                split != "predict",
            )
            # More workers would each read everything.
            return self._inner(dataset, self.evaluation_collate(), min(self.num_workers, 1), batch_size=None)

        alone = self.replicas()[0] == 1
        return self._remember(BatchLoader(make, None, self.account(split), keep=False, skip_empty=alone))

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

        account = Account("predict", self.max_bad_share)  # its own, or texts would dilute the share of bad images
        return self._remember(PredictionLoader(batches, make, account, skip_empty=False))
