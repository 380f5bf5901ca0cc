"""The base class of the methods."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.distributed.collectives import keep_from_ddp
from ...common.checked_loading import CheckedLoading, load_plain
from ...common.errors import UserError
from ...common.files import run_folder_of
from ...common.preprocessing import recorded_preprocessing
from ...common.ranges import CheckedArguments
from ..core.checkpoints import (
    CLASS_KEY,
    ORDERS_KEY,
    RESULTS_KEY,
    class_name,
    explain_misfit,
    explain_other_class,
    saved_settings,
)
from ..core.frozen import Frozen
from ..core.settings import groups_of, plain
from ..core.towers import SPACE, Space
from ..core.trainers import convert_before_restore
from ..optim.configure import (
    LRSchedulerCallable,
    OptimizerCallable,
    start_schedule,
    with_schedule,
    with_scheduler,
)
from ..optim.optimizers import clip_unscaled, scale_rates, weight_decay_groups
from ..optim.schedules import Schedule
from .exported import ExportedModule
from .model_card import Provenance, validation_results
from .sharding import shard
from .start import check_one_source, check_precision, refuse_rate_finder, refuse_stale_averages, restores_after_setup
from .vocabulary import TextTower, restored_vocabulary, vocabulary_of

Bound = tuple[nn.Parameter, float, float]
"""A parameter, its lower and its upper bound."""


class Method(CheckedArguments, CheckedLoading, ExportedModule, option=""):
    """Base class of all methods; methods that share more have one class between.

    Hooks that `trainer.fit` calls, in this order, and what they do here (a method that overrides one calls `super()`):

    1. `configure_callbacks`: nothing; a method returns the callbacks that it requires.
    2. `setup`: loads initial weights if the strategy shards. A method loads its `Frozen` networks here. The
       datamodule's `setup` runs before and may read `expected_preprocessing` and call `adopt_vocabulary`.
    3. `configure_model`: shards `sharded_networks()` if the strategy shards.
    4. `on_load_checkpoint`, `load_state_dict`: compare a restored checkpoint with the records of the frozen networks,
       the vocabulary and the settings. Strategies that shard restore after 6.
    5. `configure_optimizers`: the paper's optimizer and schedule, or the user's.
    6. `on_fit_start`: loads initial weights, unless a checkpoint was restored.
    7. `on_train_start`: logs the frozen networks, and sets the learning rate of the first step.
    8. for each batch: `on_train_batch_start` compares the sizes of the first batch of an epoch with `data_sizes()`;
       `optimizer_step`, which calls the method's `training_step` and `configure_gradient_clipping`, steps, and clamps
       parameters to their `bounds()`.
    9. `on_save_checkpoint`: adds the name of the class, results and the records of the frozen networks.

    `validate`, `test` and `predict` run 1 to 4, then `on_<stage>_start` loads initial weights if
    `evaluates_initial_weights()`. They, and validation inside `fit`, delegate steps and results to `self.evaluation`.

    A method overrides methods of the first part below, sets `self.evaluation` and defines `training_step`. Its
    constructor begins with `super().__init__(optimizer, lr_scheduler)` and `self.take_arguments(locals())`, and ends
    with `self.start_vocabulary()` if the method has text towers.

    If a method has these settings, they are read here: `vision.image_size`, `text.vocab_size`, `text.max_tokens`,
    `text.weights`, and the argument `weights`.

    Args:
        optimizer: factory of an optimizer that replaces the paper's; the paper's schedule then scales its learning
            rate.
        lr_scheduler: factory of a scheduler that replaces the paper's and steps after each optimizer step.
    """

    trains: ClassVar[bool] = True
    """Whether `fit` trains the method; one that only predicts is not exported."""

    def __init__(
        self, optimizer: OptimizerCallable | None = None, lr_scheduler: LRSchedulerCallable | None = None
    ) -> None:
        super().__init__()
        self._optimizer_factory = optimizer
        self._scheduler_factory = lr_scheduler
        self._schedule: Schedule | None = None
        self._saved_settings: Mapping[str, Any] | None = None  # of the checkpoint that is being restored

    # Methods to override

    def load_initial_weights(self) -> None:
        """Load the initial weights, and log their source; by default none."""

    def evaluates_initial_weights(self) -> bool:
        """Return whether evaluation without a checkpoint loads initial weights; by default if `weights` is given."""
        return self.hparams.get("weights") is not None

    def sharded_networks(self) -> Sequence[nn.Module]:
        """Return the networks that `configure_model` shards block by block; see `sharding.shard`."""
        return ()

    def network_methods(self) -> Sequence[str]:
        """Return the methods of sharded networks, beside `forward`, before which FSDP2 gathers their parameters."""
        return ()

    def module_methods(self) -> Sequence[str]:
        """Return the methods of this class, beside `forward` and the steps, before which FSDP2 gathers parameters."""
        return ()

    def start_example(self) -> None:
        """Prepare for a step with an `example_batch`, without data and weights; by default `setup("fit")`.

        Raises:
            UserError: If sizes depend on the data.
        """
        self.setup("fit")

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a batch with the shapes of a training, for `vlightning plan`; values have no meaning.

        Args:
            rows: Rows of the batch of one process.
            data: Arguments of the datamodule; sizes that they do not give are the module's.

        Raises:
            NotImplementedError: If the method does not define it; there is no plan for it then.
        """
        raise NotImplementedError(f"Expected {type(self).__name__}.example_batch, got none: add it.")

    @classmethod
    def interpolated(cls, content: Mapping[str, Any], source: str, ratio: float) -> dict[str, Any]:
        """Return the checkpoint of a model between the initial weights and those of a training, for `evaluate`.

        Args:
            content: The checkpoint of the training.
            source: Description of the checkpoint for messages.
            ratio: Share of the training's weights.

        Raises:
            UserError: If the method does not support it, as by default, or the initial weights cannot be read.
        """
        raise UserError(
            f"Expected a training of a method that interpolates weights, got one of {cls.__name__} in {source}: give "
            "the checkpoint of a fine-tuning."
        )

    def text_towers(self) -> Iterable[TextTower]:
        """Return the networks whose word embeddings fit a trained tokenizer, including moving averages."""
        return ()

    def bounds(self) -> Iterable[Bound]:
        """Return the parameters that are clamped after each optimizer step."""
        return ()

    def by_process(self) -> list[str]:
        """Return clauses about computations that depend on the batch of a process, beside dropout and BatchNorm.

        A run that resumes with another number of processes prints them. By default the clauses that the groups of
        settings return from their `by_process`.
        """
        groups = [group for group in vars(self).values() if hasattr(type(group), "by_process")]
        return [clause for group in groups for clause in group.by_process()]

    def no_weight_decay(self) -> Sequence[str]:
        """Return names of matrices without weight decay; vectors and biases never have any."""
        return ()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return parameter groups as in `optim.optimizers`; the optimizer's weight decay is their default."""
        return weight_decay_groups(self, self.no_weight_decay())

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimizer of the paper; see `optim.optimizers`."""
        raise NotImplementedError(
            f"Expected {type(self).__name__}.paper_optimizer or an `optimizer`, got neither: add one."
        )

    def paper_schedule(self) -> Schedule | None:
        """Return the learning-rate schedule of the paper; see `optim.schedules`."""
        return None

    # Settings

    def take_arguments(self, arguments: Mapping[str, Any], **names: str) -> None:
        """Assign the settings groups of a constructor, and save all arguments as `hparams`, as plain data.

        An argument whose type is a dataclass is a group. It is given as an instance, or as a mapping of its fields
        (from a checkpoint), and becomes an attribute, always an instance; the class body declares the attribute's type.

        Lightning adds the arguments of subclasses, and what the command line needs to build the class again.

        Args:
            arguments: `locals()` at the beginning of the constructor, after `super().__init__`.
            **names: attributes whose name differs from that of the argument.

        Raises:
            UserError: If a group is neither an instance nor a mapping, or has an unknown field.
        """
        self.save_hyperparameters()
        groups = groups_of(arguments["__class__"], arguments)
        # A mapping of a checkpoint or an export is saved as its group, so that a rebuilt module has equal settings.
        saved = {
            name: groups[name] if name in groups and isinstance(value, Mapping) else value
            for name, value in self.hparams.items()
        }
        self.save_hyperparameters(plain(saved))
        for name, group in groups.items():
            setattr(self, names.get(name, name), group)

    def change_settings(self, group: str, **values: Any) -> None:
        """Change settings of a group, in the attribute and in `hparams`."""
        setattr(self, group, dataclasses.replace(getattr(self, group), **values))
        self.hparams[group] = self.hparams[group] | values

    # Start of a run: initial weights, sharding, checkpoints

    def frozen_networks(self) -> Iterator[Frozen[Any]]:
        """Iterate over the frozen networks."""
        return (child for child in self.children() if isinstance(child, Frozen))

    def setup(self, stage: str) -> None:
        """Load initial weights if the strategy shards; such strategies restore checkpoints later.

        Raises:
            UserError: If the precision is refused, or there are two sources of initial weights.
        """
        check_precision(self, stage)
        if stage == "fit":
            refuse_rate_finder(self)
        check_one_source(self, self.hparams.get("weights"))
        if restores_after_setup(self) and (stage == "fit" or self.evaluates_initial_weights()):
            self._load_initial_weights_once()

    def configure_model(self) -> None:
        """Shard the networks if the strategy shards; exclude buffers of frozen networks from DDP's broadcasts."""
        keep_from_ddp(self, self.frozen_networks())
        shard(self, self.sharded_networks(), self.network_methods(), self.module_methods())

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Build the module of a checkpoint; see `CheckedLoading`.

        Raises:
            UserError: If the checkpoint is of another class, or its weights do not fit.
        """
        try:
            module = super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except UserError as error:  # groups of the same name in another class have other settings
            sentence = explain_other_class(cls, saved_settings(load_plain(checkpoint_path)))
            if sentence is None:
                raise
            raise UserError(sentence) from error
        if isinstance(checkpoint_path, str | Path):
            module.provenance.run = run_folder_of(Path(checkpoint_path))
        return module

    def on_fit_start(self) -> None:
        """Load initial weights, unless a checkpoint was restored."""
        self._load_initial_weights_once()

    def on_fit_end(self) -> None:
        """Keep the preprocessing and the provenance of the run, which later runs and exports read."""
        self.adopt_preprocessing(self.preprocessing())
        self.provenance = Provenance.of_run(self)

    def _load_initial_weights_once(self) -> None:
        if not self._initial.loaded:
            self._initial.loaded = True
            self.load_initial_weights()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the name of the class, results of the last evaluations, and the records of the frozen networks."""
        checkpoint[CLASS_KEY] = class_name(self)
        if (orders := self.retrieval_orders()) is not None:
            checkpoint[ORDERS_KEY] = orders
        if (results := validation_results(self))["metrics"]:
            checkpoint[RESULTS_KEY] = results
        if self.space is not None:
            checkpoint[SPACE] = self.space.as_dict()
        for frozen in self.frozen_networks():
            frozen.save_record(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adopt vocabulary, preprocessing and results of a checkpoint, and compare its frozen networks.

        Raises:
            UserError: If the weights of a frozen network differ.
        """
        convert_before_restore(self)
        self._saved_settings = saved_settings(checkpoint)
        self._initial.restored = True
        self.adopt_preprocessing(recorded_preprocessing(checkpoint))
        self.provenance = Provenance.of_checkpoint(checkpoint)
        self.adopt_retrieval_orders(checkpoint.get(ORDERS_KEY))
        self.space = Space.of(checkpoint)
        if list(self.text_towers()):
            self._resize_vocabulary(restored_vocabulary(self, checkpoint, self.hparams_initial["text"]["vocab_size"]))
        for frozen in self.frozen_networks():
            frozen.compare(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; initial weights do not replace them afterwards.

        Raises:
            UserError: If weights of a checkpoint do not fit because its class or its settings differ.
        """
        saved = self._saved_settings
        self._saved_settings = None
        self._initial.loaded = True
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, ValueError, UserError) as error:
            sentence = explain_misfit(type(self), self.hparams, saved) if saved else None
            if sentence is None:
                raise
            raise UserError(sentence) from error

    # Vocabulary, which the data adopts

    def start_vocabulary(self) -> None:
        """Adopt the vocabulary size of the argument `weights`, if it is known."""
        source = self.hparams.get("weights")
        if source is not None:
            self._shrink_vocabulary(vocabulary_of(source))

    def adopt_vocabulary(self, entries: Callable[[], int]) -> None:
        """Shrink text towers that start at random to a tokenizer; datamodules call it in `setup`.

        Towers are built for `text.vocab_size` words. Rows that no token id uses are removed before the towers are
        copied, sharded or optimized. The other parameters have the same initial values for all data.

        Args:
            entries: trains the tokenizer, if necessary, and returns its number of entries.
        """
        pretrained = self.hparams.get("weights") is not None or self._setting("text", "weights") is not None
        if list(self.text_towers()) and not (self._initial.loaded or self._initial.awaits_checkpoint or pretrained):
            self._shrink_vocabulary(entries())

    def expect_checkpoint(self) -> None:
        """Keep the vocabulary: a checkpoint will be restored, which is unknown in Lightning's `setup`."""
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
        """Return the paper's optimizer and schedule, or those of the user."""
        optimizer = (self._optimizer_factory or self.paper_optimizer)(self.parameter_groups())
        scale_rates(optimizer)
        if self._scheduler_factory is not None:
            return with_scheduler(optimizer, self._scheduler_factory)
        self._schedule = self.paper_schedule()
        return optimizer if self._schedule is None else with_schedule(self, optimizer, self._schedule)

    def on_train_start(self) -> None:
        """Log the frozen networks, and set the learning rate of the first step, which depends on the length of the run.

        Raises:
            UserError: If the schedule ends with the run and the length of the run is not known, or Lightning's weight
                averaging copied the module before its frozen networks were loaded.
        """
        refuse_stale_averages(self)
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
        """Clip gradients; for fused optimizers after division by the loss scale."""
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

    # Evaluation of initial weights

    def on_validation_start(self) -> None:
        """Load initial weights, if these are evaluated."""
        if self.evaluates_initial_weights():
            self._load_initial_weights_once()

    on_test_start = on_predict_start = on_validation_start
