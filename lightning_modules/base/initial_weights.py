"""When a module loads the weights that it starts from: once, and never over those of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning import LightningModule

from ...common.errors import UserError
from .preprocessing import recorded_preprocessing
from .trainers import callbacks_of, trainer_of


@dataclass
class InitialState:
    """What is known of the weights that a module holds before its first step.

    Attributes:
        loaded: whether the weights are final: those of a checkpoint, or the initial ones.
        restored: whether they are of a checkpoint.
        awaits_checkpoint: whether a checkpoint is going to be restored after `setup`.
        preprocessing: how the weights expect images to be prepared, in the words of `preprocessing.py`.
    """

    loaded: bool = False
    restored: bool = False
    awaits_checkpoint: bool = False
    preprocessing: dict[str, Any] | None = None


def restores_after_setup(module: LightningModule) -> bool:
    """Return whether the strategy restores checkpoints after it has sharded the module."""
    trainer = trainer_of(module)
    return trainer is not None and trainer.strategy.restore_checkpoint_after_setup


def check_one_source(module: LightningModule, weights: str | None) -> None:
    """Check that no callback replaces the weights that a module starts from.

    Such a callback has the attribute `replaces_initial_weights = True`.

    Raises:
        UserError: if there are two sources of initial weights.
    """
    if weights is None:
        return
    for callback in callbacks_of(module):
        if getattr(callback, "replaces_initial_weights", False):
            raise UserError(
                f"Expected one source of initial weights, got weights {weights!r} beside a {type(callback).__name__}: "
                "remove one of them."
            )


class InitialWeights(LightningModule):
    """The hooks of a LightningModule that starts from weights of its own unless a checkpoint is restored.

    Lightning restores a checkpoint before `on_fit_start`, and under strategies that shard only after `setup`, when
    weights can no longer be loaded as they are. A subclass supplies the first two methods, and calls `super()` where it
    overrides a hook.
    """

    _started = False  # whether the weights are where training, or an evaluation, goes on from
    _restored = False  # whether they are of a checkpoint
    _expected: dict[str, Any] | None = None  # what they expect to be done with an image, where that is known

    def load_initial_weights(self) -> None:
        """Load them."""
        raise NotImplementedError

    def evaluates_initial_weights(self) -> bool:
        """Whether an evaluation without a checkpoint loads them too."""
        raise NotImplementedError

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """What the initial weights expect to be done with an image; None where there are none, or nobody knows."""
        return None

    def picture_size(self) -> int | None:
        """Side of the images that the network is made for, pixels."""
        return self.hparams.get("image_size")

    def adopt_preprocessing(self, record: Mapping[str, Any] | None) -> None:
        """Take over what weights that come from outside expect to be done with an image."""
        self._expected = None if record is None else dict(record)

    def expected_preprocessing(self) -> dict[str, Any]:
        """What the weights expect to be done with an image, in the words of `preprocessing.py`; datamodules ask.

        It is the checkpoint's, else that of the initial weights; of a network that starts at random, its size alone.
        """
        if self._expected is None and not self._restored:
            self._expected = self.initial_preprocessing()
        size = self.picture_size()
        return (self._expected or {}) | ({} if size is None else {"image_size": size})

    def preprocessing(self) -> dict[str, Any] | None:
        """What exports say of how images are made ready: as the trainer's datamodule does, else as is expected."""
        data = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        found: dict[str, Any] | None = getattr(data, "preprocessing", None) or self.expected_preprocessing()
        return found if found and ("mean" in found or "transform" in found) else None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what evaluation did to an image in the training that the checkpoint is of."""
        super().on_load_checkpoint(checkpoint)
        self._restored = True
        self.adopt_preprocessing(recorded_preprocessing(checkpoint))

    def setup(self, stage: str) -> None:
        """Load initial weights where what stands now is going to be sharded; such strategies restore later.

        Raises:
            ValueError: if there are two things to start from.
        """
        check_one_source(self, self.hparams.get("weights"))
        # Without a Trainer it was called by hand, and nothing is sharded.
        shards = self._trainer is not None and self._trainer.strategy.restore_checkpoint_after_setup
        if shards and (stage == "fit" or self.evaluates_initial_weights()):
            self._start()

    def on_fit_start(self) -> None:
        """Load initial weights; a checkpoint would have been restored by now."""
        self._start()

    def on_validation_start(self) -> None:
        """Evaluate the initial weights, unless a checkpoint was restored."""
        self._start_evaluation()

    def on_test_start(self) -> None:
        """Evaluate the initial weights, unless a checkpoint was restored."""
        self._start_evaluation()

    def on_predict_start(self) -> None:
        """Use the initial weights, unless a checkpoint was restored."""
        self._start_evaluation()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; a training goes on from them, and leaves the initial ones alone."""
        self._started = True
        return super().load_state_dict(state_dict, strict, assign)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.load_initial_weights()

    def _start_evaluation(self) -> None:
        if self.evaluates_initial_weights():
            self._start()
