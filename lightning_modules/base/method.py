"""The one base of the methods."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer

from ...callbacks.distributed.collectives import keep_from_ddp
from ...common.checked_loading import CheckedLoading
from ...common.errors import UserError
from ...common.private_api import load_plain
from ..evaluation.protocol import Batch, Evaluation
from ..optim.clipping import clip_unscaled
from ..optim.configure import start_schedule, with_schedule, with_scheduler
from ..optim.parameter_groups import scale_rates, weight_decay_groups
from ..optim.schedules import Schedule
from .checkpoints import explain_misfit, explain_other_class
from .data_sizes import DataSizes, compare_sizes
from .frozen import Frozen
from .initial_weights import InitialState, check_one_source, restores_after_setup
from .preprocessing import recorded_preprocessing
from .settings import plain
from .sharding import shard
from .trainers import datamodule_of
from .vocabulary import TextTower, restored_vocabulary, vocabulary_of

Bound = tuple[nn.Parameter, float, float]
"""A parameter, its smallest and its largest value."""


class Method(CheckedLoading, LightningModule):
    """A LightningModule with what all methods share; a method has no other base.

    The hooks that `trainer.fit` calls, in this order, and what they do here (a method that overrides one calls
    `super()`):

    1. `configure_callbacks`: nothing; a method names the callbacks that it cannot run without.
    2. `setup`: loads initial weights where the strategy shards. A method loads its `Frozen` networks here. The
       datamodule's `setup` comes before it, and may ask for `expected_preprocessing` and call `adopt_vocabulary`.
    3. `configure_model`: shards `sharded_networks()` where the strategy shards.
    4. `on_load_checkpoint`, `load_state_dict`: compare a checkpoint that is restored with the records of the frozen
       networks, the vocabulary and the settings. Strategies that shard do so after 6.
    5. `configure_optimizers`: the paper's optimizer and schedule, or the user's.
    6. `on_fit_start`: loads initial weights, unless a checkpoint was restored.
    7. `on_train_start`: logs which frozen networks are used, and sets the learning rate of the first step.
    8. for each batch: `on_train_batch_start` compares the sizes of the first batch of an epoch with `data_sizes()`;
       `optimizer_step`, which calls the method's `training_step` and `configure_gradient_clipping`, steps, and clamps
       parameters to their `bounds()`.
    9. `on_save_checkpoint`: adds the records of the frozen networks.

    `validate`, `test` and `predict` go through 1 to 4, then `on_<stage>_start` loads initial weights if
    `evaluates_initial_weights()`, and the rest is handed to `self.evaluation`. Validation inside `fit` too.

    Points that a method fills are the methods in the first part below. It also sets `self.evaluation`, defines
    `training_step`, begins its constructor with `super().__init__(optimizer, lr_scheduler)` and `self.save_settings()`,
    and ends it with `self.start_vocabulary()` if it has text towers.

    Groups of settings that are read here where a method has them: `vision.image_size`, `text.vocab_size`,
    `text.max_tokens` and `text.weights`; and the argument `weights`.

    Args:
        optimizer: makes the optimizer that replaces the paper's; the paper's schedule then scales its learning rate.
        lr_scheduler: makes the scheduler that replaces the paper's; it steps after each optimizer step.
    """

    def __init__(
        self, optimizer: OptimizerCallable | None = None, lr_scheduler: LRSchedulerCallable | None = None
    ) -> None:
        super().__init__()
        self.evaluation: Evaluation | None = None
        self._own_optimizer = optimizer
        self._own_scheduler = lr_scheduler
        self._schedule: Schedule | None = None
        self._initial = InitialState()
        self._saved_settings: Mapping[str, Any] | None = None  # of the checkpoint that is being restored

    # Points that a method fills

    def load_initial_weights(self) -> None:
        """Load the weights that training starts from, and log what was done; by default none."""

    def evaluates_initial_weights(self) -> bool:
        """Return whether an evaluation without a checkpoint loads them; by default whether `weights` is given."""
        return self.hparams.get("weights") is not None

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return how the initial weights expect images to be prepared; None where there are none or it is unknown."""
        return None

    def expected_image_size(self) -> int | None:
        """Return the side of the images that the networks are made for, in pixels; by default `vision.image_size`."""
        return self._setting("vision", "image_size")

    def data_sizes(self) -> DataSizes:
        """Return what the networks can take; by default what the groups `vision` and `text` say."""
        return DataSizes(
            self._setting("vision", "image_size"),
            self._setting("text", "vocab_size"),
            self._setting("text", "max_tokens"),
        )

    def sharded_networks(self) -> Sequence[nn.Module]:
        """Return the networks that `configure_model` shards block by block; see `sharding.shard`."""
        return ()

    def text_towers(self) -> Iterable[TextTower]:
        """Return the networks with word embeddings that fit a trained tokenizer, those of moving averages too."""
        return ()

    def bounds(self) -> Iterable[Bound]:
        """Return the parameters that are clamped after each optimizer step."""
        return ()

    def no_weight_decay(self) -> Sequence[str]:
        """Return names of matrices that do not decay; vectors and biases never do."""
        return ()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return what trains, as `optim.parameter_groups` does: a group without `weight_decay` has the optimizer's."""
        return weight_decay_groups(self, self.no_weight_decay())

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimizer of the paper; see `optim.adamw` and `optim.sgd`."""
        raise NotImplementedError(f"{type(self).__name__} has no `paper_optimizer`, and was given no `optimizer`.")

    def paper_schedule(self) -> Schedule | None:
        """Return the learning-rate schedule of the paper; see `optim.schedules`."""
        return None

    # Settings

    def save_settings(self) -> None:
        """Keep the arguments of the calling constructor as `hparams`, plain data; groups become dictionaries."""
        frame = inspect.currentframe()
        self.save_hyperparameters(frame=None if frame is None else frame.f_back)
        self.hparams.update(plain(self.hparams))

    @property
    def hparams_initial(self) -> Any:
        """The arguments as they were given, plain data."""
        initial = super().hparams_initial
        initial.update(plain(initial))
        return initial

    def change_settings(self, group: str, **values: Any) -> None:
        """Change settings of a group, in the attribute and in `hparams`."""
        setattr(self, group, dataclasses.replace(getattr(self, group), **values))
        self.hparams[group] = self.hparams[group] | values

    def _setting(self, group: str, name: str) -> Any:
        return getattr(getattr(self, group, None), name, None)

    # Start: initial weights, sharding, checkpoints

    @property
    def datamodule(self) -> Any | None:
        """The datamodule of the run; None outside a run, or where the run has loaders alone."""
        return datamodule_of(self)

    def frozen_networks(self) -> Iterator[Frozen[Any]]:
        """Iterate over the parts that hold a frozen network."""
        return (part for part in self.children() if isinstance(part, Frozen))

    def setup(self, stage: str) -> None:
        """Load initial weights where they are going to be sharded; such strategies restore checkpoints later.

        Raises:
            UserError: if there are two sources of initial weights.
        """
        check_one_source(self, self.hparams.get("weights"))
        if restores_after_setup(self) and (stage == "fit" or self.evaluates_initial_weights()):
            self._load_initial_weights_once()

    def configure_model(self) -> None:
        """Shard the networks where the strategy shards; keep buffers of frozen networks out of DDP's broadcasts."""
        keep_from_ddp(self, self.frozen_networks())
        shard(self, self.sharded_networks())

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Build the module of a checkpoint; see `CheckedLoading`.

        Raises:
            UserError: if the checkpoint is of another class, or its weights do not fit.
        """
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except UserError as error:  # groups of the same name have other settings there
            saved = load_plain(checkpoint_path).get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}
            if (sentence := explain_other_class(cls, saved)) is None:
                raise
            raise UserError(sentence) from error

    def on_fit_start(self) -> None:
        """Load initial weights; a checkpoint would have been restored by now."""
        self._load_initial_weights_once()

    def _load_initial_weights_once(self) -> None:
        if not self._initial.loaded:
            self._initial.loaded = True
            self.load_initial_weights()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the records of the frozen networks."""
        for frozen in self.frozen_networks():
            frozen.save_record(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adopt vocabulary and preprocessing of a checkpoint, and compare its frozen networks with the present ones.

        Raises:
            ValueError: if the weights of a frozen network differ.
        """
        self._saved_settings = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)
        self._initial.restored = True
        self.adopt_preprocessing(recorded_preprocessing(checkpoint))
        if list(self.text_towers()):
            self._resize_vocabulary(restored_vocabulary(self, checkpoint, self.hparams_initial["text"]["vocab_size"]))
        for frozen in self.frozen_networks():
            frozen.compare(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, which initial weights no longer replace.

        Raises:
            UserError: if weights of a checkpoint do not fit because its class or its settings differ.
        """
        saved, self._saved_settings = self._saved_settings, None
        self._initial.loaded = True
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, ValueError, UserError) as error:
            sentence = explain_misfit(type(self), self.hparams, saved) if saved else None
            if sentence is None:
                raise
            raise UserError(sentence) from error

    # Preprocessing and vocabulary: what the data has to know

    def adopt_preprocessing(self, record: Mapping[str, Any] | None) -> None:
        """Take over how weights that come from outside expect images to be prepared."""
        self._initial.preprocessing = None if record is None else dict(record)

    def expected_preprocessing(self) -> dict[str, Any]:
        """Return how the weights expect images to be prepared, in the words of `preprocessing.py`; datamodules ask.

        It is the checkpoint's record, else that of the initial weights, and the image size.
        """
        if self._initial.preprocessing is None and not self._initial.restored:
            self._initial.preprocessing = self.initial_preprocessing()
        size = self.expected_image_size()
        return (self._initial.preprocessing or {}) | ({} if size is None else {"image_size": size})

    def preprocessing(self) -> dict[str, Any] | None:
        """Return what exports say of preprocessing: what the run's datamodule does, else what the weights expect."""
        found = getattr(self.datamodule, "preprocessing", None) or self.expected_preprocessing()
        return found if found and ("mean" in found or "transform" in found) else None

    def start_vocabulary(self) -> None:
        """Take over the vocabulary of the argument `weights`, if it is known."""
        source = self.hparams.get("weights")
        if source is not None:
            self._shrink_vocabulary(vocabulary_of(source))

    def adopt_vocabulary(self, entries: Callable[[], int]) -> None:
        """Shrink text towers that start at random to a tokenizer; datamodules call it in `setup`.

        Towers are built for `text.vocab_size` words, and lose the rows that no token id reaches before anything copies,
        shards or optimizes them. The other parameters start with the same values for all data.

        Args:
            entries: trains the tokenizer, where that has not been done, and counts its entries.
        """
        given = self.hparams.get("weights") is not None or self._setting("text", "weights") is not None
        if list(self.text_towers()) and not (self._initial.loaded or self._initial.awaits_checkpoint or given):
            self._shrink_vocabulary(entries())

    def expect_checkpoint(self) -> None:
        """Keep the vocabulary: a checkpoint is going to be restored, which Lightning does not say in `setup`."""
        self._initial.awaits_checkpoint = True

    def _shrink_vocabulary(self, entries: int | None) -> None:
        if entries is not None and entries < self._setting("text", "vocab_size"):
            self._resize_vocabulary(entries)

    def _resize_vocabulary(self, entries: int | None) -> None:
        if entries is not None and entries != self._setting("text", "vocab_size"):
            for tower in self.text_towers():
                tower.resize_vocabulary(entries)
            self.change_settings("text", vocab_size=entries)

    # Optimizer

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the paper's optimizer and schedule, or those that the user gave in their place."""
        make = self._own_optimizer or self.paper_optimizer
        optimizer = make(self.parameter_groups())
        scale_rates(optimizer)
        if self._own_scheduler is not None:
            return with_scheduler(optimizer, self._own_scheduler)
        self._schedule = self.paper_schedule()
        return optimizer if self._schedule is None else with_schedule(self, optimizer, self._schedule)

    def on_train_start(self) -> None:
        """Log the frozen networks, and give the first step the learning rate of a run of this length.

        Raises:
            ValueError: if the schedule ends with the run and the length of the run is not known.
        """
        for frozen in self.frozen_networks():
            if frozen.origin is not None:
                rank_zero_info(f"The {frozen.role} is {frozen.origin['name']} of {frozen.origin['weights']!r}.")
        if self._schedule is not None:
            start_schedule(self, self._schedule)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients, of fused optimizers after they were divided by the loss scale."""
        if not clip_unscaled(self.trainer, optimizer, gradient_clip_val, gradient_clip_algorithm):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Any = None,
    ) -> None:
        """Step, then clamp parameters to their bounds."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            for parameter, smallest, largest in self.bounds():
                parameter.clamp_(smallest, largest)

    # Batches and evaluation

    def compare_sizes(self, batch: Any) -> None:
        """Compare images and token ids of a batch with `data_sizes()`.

        Raises:
            ValueError: if something does not fit.
        """
        free = self._setting("text", "vocab_size") is not None and self.hparams.get("weights") is None
        compare_sizes(self, batch, self.data_sizes(), free)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare the sizes of the first batch."""
        self._compare_first(batch, batch_idx)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Compare the sizes of the first batch."""
        self._compare_first(batch, batch_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _compare_first(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.compare_sizes(batch)

    def on_validation_start(self) -> None:
        """Load initial weights, where these are evaluated."""
        if self.evaluates_initial_weights():
            self._load_initial_weights_once()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_epoch_start(self) -> None:
        """Start the evaluation."""
        self._evaluation().start()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate a batch."""
        self._evaluation().step(self, batch, "validate")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate a batch."""
        self._evaluation().step(self, batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return predictions of a batch."""
        return self._evaluation().predict(self, batch)

    def on_validation_epoch_end(self) -> None:
        """Log the results."""
        self._evaluation().finish(self, "validate")

    def on_test_epoch_end(self) -> None:
        """Log the results."""
        self._evaluation().finish(self, "test")

    def on_predict_epoch_end(self) -> None:
        """Finish the predictions."""
        self._evaluation().finish(self, "predict")

    def _evaluation(self) -> Evaluation:
        if self.evaluation is None:
            raise NotImplementedError(f"{type(self).__name__} has no `evaluation`: set one, or leave out the data.")
        return self.evaluation
