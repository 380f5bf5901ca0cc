"""How many words text towers know: as many as the tokenizer that a run trains, not as many as it might have had."""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning import LightningModule
from torch.distributed.tensor import DTensor

from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from .initial_weights import InitialWeights

_WORDS = "embeddings.word_embeddings.weight"


class TextTower(Protocol):
    """A network with word embeddings."""

    def resize_vocabulary(self, entries: int) -> None:
        """Keep the embeddings of so many words, the first ones."""


class TrainedVocabulary(InitialWeights):
    """A LightningModule whose argument `vocab_size` is the most words that its text towers may know.

    How many entries a tokenizer gets that is trained for a run is not known when the module is built. So the towers are
    built for `vocab_size` words, and lose the rows that no token id reaches before anything copies, shards or optimizes
    them; `hparams["vocab_size"]`, which checkpoints and exports hold, says how many are left. The other parameters
    start as they would have, whatever the data are. Networks that start from weights have the vocabulary of these.

    A subclass supplies `text_towers`, calls `start_vocabulary` at the end of its constructor, and calls `super()` where
    it overrides a hook.
    """

    _awaits_checkpoint = False

    def text_towers(self) -> Iterable[TextTower]:
        """The networks with word embeddings, those of a moving average too."""
        raise NotImplementedError

    def start_vocabulary(self) -> None:
        """Take over the vocabulary of the argument `weights`, if that says how many words it has."""
        source = self.hparams["weights"]
        if source is not None:
            self._shrink(vocabulary_of(source))

    def adopt_vocabulary(self, entries: Callable[[], int]) -> None:
        """Shrink text towers that start at random to a tokenizer; datamodules call it in `setup`.

        Args:
            entries: trains the tokenizer, where that has not been done, and counts its entries.
        """
        given = any(self.hparams[name] is not None for name in ("weights", "text_weights"))
        if not (self._started or self._awaits_checkpoint or given):
            self._shrink(entries())

    def expect_checkpoint(self) -> None:
        """Keep the vocabulary: a checkpoint is going to be restored, which Lightning does not say in `setup`."""
        self._awaits_checkpoint = True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the vocabulary of a checkpoint whose tokenizer was trained, up to the argument `vocab_size`."""
        super().on_load_checkpoint(checkpoint)
        entries = (checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY) or {}).get("vocab_size")
        most = self.hparams_initial["vocab_size"]
        # Sharded towers keep their size, and say so where the weights do not fit.
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        if isinstance(entries, int) and not sharded and (entries == most or (entries < most and _trained(checkpoint))):
            self._resize(entries)

    def _shrink(self, entries: int | None) -> None:
        if entries is not None and entries < self.hparams["vocab_size"]:
            self._resize(entries)

    def _resize(self, entries: int) -> None:
        if entries != self.hparams["vocab_size"]:
            for tower in self.text_towers():
                tower.resize_vocabulary(entries)
            self.hparams["vocab_size"] = entries


def restored_vocabulary(module: LightningModule, checkpoint: Mapping[str, Any], most: int) -> int | None:
    """Return how many words a checkpoint that is restored knows; None where the module keeps its own number.

    A checkpoint whose tokenizer was trained may know fewer words than the setting `text.vocab_size`.

    Args:
        module: what is restored.
        checkpoint: of a training.
        most: words that the module was built for.
    """
    entries = ((checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY) or {}).get("text") or {}).get("vocab_size")
    # Sharded towers keep their size; where the weights do not fit, loading them reports it.
    if not isinstance(entries, int) or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return None
    return entries if entries == most or (entries < most and _trained(checkpoint)) else None


def vocabulary_of(source: str) -> int | None:
    """How many words trained weights know; None where nothing can be read, which loading them explains.

    Args:
        source: a checkpoint, file or folder, in our layout or that of ALBEF's authors, or the folder of an export.
    """
    path = Path(source).expanduser()
    try:
        if (path / "config.json").is_file():
            arguments = json.loads((path / "config.json").read_text(encoding="utf-8"))["arguments"]
            return _number(_of_text(arguments))
        # Nothing but the pages with the structure of the file is read.
        content = torch.load(path / METADATA if path.is_dir() else path, "cpu", weights_only=True, mmap=True)
        if "hyper_parameters" in content:
            return _number(_of_text(content["hyper_parameters"]))
        state = content.get("state_dict", content.get("model", content))
        return next((len(tensor) for name, tensor in state.items() if name.endswith(_WORDS)), None)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, pickle.UnpicklingError):
        return None


def _of_text(arguments: Mapping[str, Any]) -> Any:
    return arguments["text"]["vocab_size"] if "text" in arguments else arguments["vocab_size"]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _trained(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the data of a checkpoint had a trained tokenizer, which is in the state of the datamodule."""
    # Lightning keeps that state under the name of the class, whatever it is.
    states = [state for name, state in checkpoint.items() if not name.endswith("hyper_parameters")]
    return any(isinstance(state, Mapping) and isinstance(state.get("tokenizer"), str) for state in states)
