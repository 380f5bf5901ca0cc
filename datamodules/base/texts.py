"""Texts of datamodules: tokenizer, texts for prediction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from ...common.clip_vocabulary import CLIP
from ...common.errors import UserError
from ...common.ranges import COUNT, CheckedArguments, Range
from ...common.tokenizers import (
    open_tokenizer,
    set_ending,
    to_json,
    tokenizer_from_json,
    tokenizer_in_checkpoint,
)
from ..text.captions import usable_caption
from ..text.clip import CLIPTextEncoder
from ..text.tokenizers import (
    Encoder,
    TextEncoder,
    tokenizer_digest,
    train_wordpiece,
)
from .contract import AdoptsVocabulary, ExpectsTexts, asked_of
from .faults import Account, Collated
from .loaders import BatchLoader, PredictionLoader
from .sampling import evaluation_batches
from .stages import Split, splits_of
from .text_files import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..text.clip_tokenizer import CLIPTokenizer

log = logging.getLogger(__name__)


class PredictTexts:
    """Texts for prediction, from a list or a text file with one text per line.

    Args:
        source: the list, or the path of the file; None for no texts.
        clean: whether to apply ALBEF's caption cleaning.
        max_words: number of words that the cleaning keeps.
    """

    def __init__(self, source: str | list[str] | None, clean: bool, max_words: int) -> None:
        self.source = source
        self.clean = clean
        self.max_words = max_words

    @cached_property
    def all(self) -> list[str]:
        """All texts; empty texts are in no batch."""
        return read_texts(self.source) if isinstance(self.source, str) else list(self.source or ())

    def usable(self) -> dict[int, tuple[int, str]]:
        """Return the texts that are not empty, as pairs of index and text by index."""
        return {pair[0]: pair for pair in enumerate(self.all) if usable_caption(pair[1], self.clean, self.max_words)}

    def check(self) -> None:
        """Check that at least one text is not empty, and log the number of empty texts.

        Raises:
            UserError: If texts were given, and all of them are empty.
        """
        if self.source is None:
            return
        total = len(self.all)
        usable = len(self.usable())
        if not usable:
            origin = f" in {self.source!r}" if isinstance(self.source, str) else ""
            raise UserError(
                f"Expected at least one text that is not empty, got {total} empty texts{origin}: set "
                "data.predict_texts to a text file with one text per line, or to a list of texts."
            )
        if usable < total:
            rank_zero_info(f"{total - usable} of the {total} texts to predict are empty and skipped.")


@dataclass
class TextCollate:
    """Build batches of texts: `input_ids`, `attention_mask`, and `text_index` [T], the index of each text."""

    encoder: Encoder

    def __call__(self, texts: Sequence[tuple[int, str]]) -> Collated:
        """Build a batch of pairs of an index and a text."""
        batch = {
            **self.encoder([text for _, text in texts]),
            "text_index": torch.tensor([index for index, _ in texts]),
        }
        return Collated(batch, len(texts), [])


class TokenizedTexts(CheckedArguments, pl.LightningDataModule):
    """Tokenizer, and texts for prediction; a base class of the datamodules of images with texts.

    It stands before `ImageTransforms` and `SampledDataModule` among the base classes.

    Args:
        tokenizer: hub name, local folder, BERT `vocab.txt` or `tokenizer.json`, or "clip" for CLIP's own; by
            default that of the module's text encoder, else a WordPiece tokenizer that is trained on the training
            captions. Both are saved in checkpoints.
        vocab_size: largest number of entries of a tokenizer (BERT: 30,522); the module adopts the actual number of
            entries of a trained tokenizer.
        max_tokens: longest token sequence, special tokens included (ALBEF: 25).
        append_sep: whether sequences end with [SEP], as in BERT; the ALBEF authors omit it.
        clean_captions: whether to apply ALBEF's caption cleaning.
        max_words: number of words that the cleaning keeps (ALBEF: 30).
        pad_to_multiple_of: texts of a batch are padded to a length that this divides, at most to `max_tokens`; 8
            makes few lengths and `max_tokens` one, for which a compiled network is compiled once. By default to the
            longest text of the batch. The draws of masked words depend on the length.
        predict_texts: texts for prediction, beside images or alone: a list, or a text file with one text per line.
    """

    asks: ClassVar[tuple[type, ...]] = (AdoptsVocabulary, ExpectsTexts)

    # Members of `SampledDataModule` and `ImageTransforms`
    _rows: dict[Split, Any]
    eval_batch_size: int
    max_bad_share: float
    preprocessing: dict[str, Any] | None
    _evaluation_loader: Callable[..., BatchLoader]
    open_split: Callable[[Split], Any]
    registered: Callable[[BatchLoader], BatchLoader]
    replicas: Callable[[], tuple[int, int]]
    torch_loader: Callable[..., DataLoader[Any]]

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        vocab_size: Annotated[int, COUNT] = 30522,
        max_tokens: Annotated[int, Range(least=3)] = 25,
        append_sep: bool = True,
        clean_captions: bool = False,
        max_words: Annotated[int, COUNT] = 30,
        pad_to_multiple_of: Annotated[int, COUNT] = 1,
        predict_texts: str | list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.append_sep = append_sep
        self.clean_captions = clean_captions
        self.max_words = max_words
        self.pad_to_multiple_of = pad_to_multiple_of
        self._texts = PredictTexts(predict_texts, clean_captions, max_words)
        self._tokenizer_name = tokenizer
        self._tokenizer: PreTrainedTokenizerFast | CLIPTokenizer | None = None
        self._trained: str | None = None
        self._newly_trained: str | None = None  # not in use yet: a checkpoint may have another tokenizer

    # Lightning's hooks

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, let the module adopt the vocabulary, and check the texts for prediction.

        Raises:
            UserError: If a split cannot be used, or all texts are empty.
        """
        super().setup(stage)  # type: ignore[arg-type]
        if stage == "fit":
            self._size_vocabulary()
        if "predict" in splits_of(stage):
            self._texts.check()

    def predict_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return the loaders of the `predict` source and of the texts; each image and each text is read once.

        An image has its captions, if any. Batches of texts hold `input_ids`, `attention_mask` and `text_index`,
        the index in `predict_texts`.
        """
        if not self.predict_texts:
            return self._evaluation_loader("predict")
        texts = self._text_loader()
        return [self._evaluation_loader("predict"), texts] if "predict" in self._rows else texts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, the preprocessing of evaluation, and a trained tokenizer."""
        return super().state_dict() | {"preprocessing": self.preprocessing, "tokenizer": self._trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed and the trained tokenizer of a checkpoint."""
        super().load_state_dict(state_dict)
        tokenizer = state_dict.get("tokenizer")
        if tokenizer is not None and self._given_tokenizer() is not None:
            rank_zero_warn(
                f"The checkpoint has a trained tokenizer ({tokenizer_digest(tokenizer)}), but data.tokenizer is "
                f"{self._tokenizer_name!r}: token ids differ from those in the checkpoint."
            )
        elif tokenizer is not None:
            self._trained = tokenizer
            self._tokenizer = None

    # For the module, callbacks and loaders

    @property
    def predict_texts(self) -> list[str]:
        """Texts for prediction, by `text_index`; empty texts are in no batch."""
        return self._texts.all

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast | CLIPTokenizer:
        """The tokenizer; it is trained on the training captions at the first use if none was given or restored."""
        if self._tokenizer is None:
            tokenizer: Any
            if self._tokenizer_name == CLIP:
                from ..text.clip_tokenizer import clip_tokenizer

                tokenizer = clip_tokenizer(self.max_tokens)
            elif (given := self._given_tokenizer()) is not None:
                tokenizer = open_tokenizer(given)
            else:
                if self._trained is None:
                    resumed = getattr(self.trainer, "ckpt_path", None)
                    name = self._module_tokenizer()
                    self._trained = tokenizer_in_checkpoint(resumed) or (
                        self._train_tokenizer() if name is None else to_json(open_tokenizer(name).backend_tokenizer)
                    )
                tokenizer = tokenizer_from_json(self._trained)
            if len(tokenizer) > self.vocab_size and self._module_tokenizer() is None:  # else the module compares
                raise UserError(
                    f"Expected at most data.vocab_size={self.vocab_size} entries in the tokenizer "
                    f"{self._tokenizer_name or 'of the checkpoint'!r}, got {len(tokenizer)}: increase vocab_size, of "
                    "model and data."
                )
            if self._tokenizer_name != CLIP:
                set_ending(tokenizer, self.append_sep)
            self._tokenizer = tokenizer
        return self._tokenizer

    @property
    def special_token_ids(self) -> dict[str, int | None]:
        """Ids of `pad`, `cls`, `sep` and `mask`; None if the tokenizer has no such token."""
        tokenizer = self.tokenizer
        return {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep", "mask")}

    def _module_tokenizer(self) -> str | None:
        """Return the name of the tokenizer of the module's text encoder, if it has one."""
        module = asked_of(self.trainer, ExpectsTexts)  # type: ignore[type-abstract]
        return None if module is None else module.expected_tokenizer()

    def _given_tokenizer(self) -> str | None:
        """Return the given name; None if it is that of the module's text encoder, which checkpoints contain."""
        return None if self._tokenizer_name == self._module_tokenizer() else self._tokenizer_name

    def _text_prefix(self) -> str:
        module = asked_of(self.trainer, ExpectsTexts)  # type: ignore[type-abstract]
        return "" if module is None else module.text_prefix

    def _size_vocabulary(self) -> None:
        """Let the module adopt the size of the trained tokenizer, before callbacks copy the module."""
        module = asked_of(self.trainer, AdoptsVocabulary)  # type: ignore[type-abstract]
        if module is not None and self._tokenizer_name is None:
            module.adopt_vocabulary(lambda: len(tokenizer_from_json(self._trained or self._train_tokenizer())))

    def _train_tokenizer(self) -> str:
        if self._newly_trained is not None:
            return self._newly_trained
        if "train" not in self._rows and (rows := self.open_split("train")) is not None:
            self._rows["train"] = rows
        if "train" not in self._rows:
            raise UserError(
                "Expected a tokenizer or training captions to train one on, got neither: give data.tokenizer, "
                "data.train, or the checkpoint of the run that trained it."
            )
        self._newly_trained = train_wordpiece(self._rows["train"].texts(), self.vocab_size)
        log.info("Trained a WordPiece tokenizer on the training captions (%s)", tokenizer_digest(self._newly_trained))
        return self._newly_trained

    def encoder(self) -> Encoder:
        """Return the encoder of captions."""
        tokenizer: Any = self.tokenizer
        if self._tokenizer_name == CLIP:
            return CLIPTextEncoder(self.max_tokens, self.clean_captions, self.max_words)
        return TextEncoder(
            tokenizer,
            self.max_tokens,
            self.clean_captions,
            self.max_words,
            self.pad_to_multiple_of,
            self._text_prefix(),
        )

    # Loaders

    def _can_predict(self) -> tuple[bool, str]:
        return bool(self.predict_texts), " or data.predict_texts, or both"

    def _text_loader(self) -> BatchLoader:
        texts = self._texts.usable()
        numbers = list(texts)
        replicas, rank = self.replicas()
        shares = evaluation_batches(len(numbers), self.eval_batch_size, rank, replicas)
        batches = [[numbers[item] for item in share] for share in shares]

        def make(batch_sampler: Any) -> DataLoader[Any]:
            # No workers, since no images are decoded.
            return self.torch_loader(texts, TextCollate(self.encoder()), workers=0, batch_sampler=batch_sampler)

        # A separate account, so that texts do not lower the share of unusable images.
        account = Account("predict", self.max_bad_share)
        return self.registered(PredictionLoader(batches, make, account, skip_empty=False))
