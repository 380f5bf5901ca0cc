"""Where the weights of a module come from, for exports: the training, and the tokenizer of its data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from tokenizers import Tokenizer

from ..core.tokenizer_reader import read_tokenizer
from ..core.trainers import datamodule_of, trainer_of
from .model_card import Training

_LARGE = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks")


def tokenizer_of_data(datamodule: Any | None) -> str | None:
    """Return the tokenizer of a datamodule as JSON text; None without one of the `tokenizers` library.

    Without the padding and the length of the texts that it read last.
    """
    backend = getattr(getattr(datamodule, "tokenizer", None), "backend_tokenizer", None)
    if backend is None:
        return None
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())


@dataclass
class Provenance:
    """What is known of the weights of a module after the run, the checkpoint or the export that they come from.

    Attributes:
        checkpoint: the checkpoint without weights and states; empty if the weights are of no checkpoint.
        run: folder of the checkpoint's run.
        training: the training of a run that ended, or of an export.
        tokenizer_json: the tokenizer of such a run or export, as JSON text.
    """

    checkpoint: dict[str, Any] = field(default_factory=dict)
    run: Path | None = None
    training: Training | None = None
    tokenizer_json: str | None = None

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any], run: Path | None = None) -> "Provenance":
        """Keep what an export needs of a checkpoint."""
        kept = {name: value for name, value in content.items() if name not in _LARGE}
        states = content.get("callbacks") or {}
        seeds = {name: {"seed": state["seed"]} for name, state in states.items() if "seed" in (state or ())}
        return cls(kept | {"callbacks": seeds}, run)

    @classmethod
    def of_run(cls, module: LightningModule) -> "Provenance":
        """Keep what an export needs of the run that a module is attached to."""
        return cls(training=Training.of_run(module), tokenizer_json=tokenizer_of_data(datamodule_of(module)))

    def training_of(self, module: LightningModule) -> Training:
        """Return what is known of the training of a module's weights."""
        trainer = trainer_of(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            return Training.of_run(module)
        if self.checkpoint:
            return Training.of_checkpoint(self.checkpoint, self.run)
        return self.training or Training.of_run(module)

    def tokenizer_of(self, module: LightningModule) -> str | None:
        """Return the tokenizer of a module's data as JSON text: of its run, or of where its weights come from."""
        found = tokenizer_of_data(datamodule_of(module)) or self.tokenizer_json
        return read_tokenizer(self.checkpoint)[0] if found is None and self.checkpoint else found
