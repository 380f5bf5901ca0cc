"""Every private name of jsonargparse, Lightning and torch that the command line and its callbacks use, with the reason.

Methods that are overridden in subclasses cannot be wrapped here; `OVERRIDDEN` lists them.
"""

from importlib import import_module
from typing import Any

OVERRIDDEN = {
    "LightningCLI._parse_ckpt_path": "parses a checkpoint's hyper-parameters over what was typed; `cli.py` reads them "
    "before, so that typed values override",
    "LightningCLI._instantiate_trainer": "the only place where the Trainer's arguments are complete and its callbacks "
    "can be added to",
    "LightningCLI._run_subcommand": "the only place around the run itself",
    "DefaultHelpFormatter._get_help_string": "lists every imported subclass of a type",
    "RichProgressBar._init_progress": "creates the column of the metrics (`_metric_component`), for the "
    "terminal in `_console`",
    "_SubprocessScriptLauncher.launch": "starts the thread that kills this process without a message",
}


def constructor_parameters(cls: type) -> list[Any]:
    """Return a class's constructor parameters as the parser sees them, each with name, annotation, default and kind.

    `inspect.signature` shows `**kwargs` in place of the arguments of the base class that it passes on to.
    """
    from jsonargparse._parameter_resolvers import get_signature_parameters

    return list(get_signature_parameters(cls, None, logger=False))


def parser_actions(parser: Any) -> list[Any]:
    """Return the options of a parser; jsonargparse lists them nowhere else."""
    return list(parser._actions)


def option_type(action: Any) -> Any:
    """Return the type of an option's value; `action.type` is None for every type that is not a plain class."""
    return getattr(action, "_typehint", action.type)


def take_text_verbatim(action: Any) -> None:
    """Stop an option from replacing the name of a file by the file's content."""
    action._enable_path = False


def groups_of_options(parser: Any) -> list[tuple[Any, list[Any]]]:
    """Return the groups of a parser's help, each with its options; `sort_groups` reorders the same groups."""
    return [(group, group._group_actions) for group in parser._action_groups]


def sort_groups(parser: Any, key: Any) -> None:
    """Reorder the groups of a parser's help; argparse keeps the order in which they were added."""
    parser._action_groups.sort(key=key)


def shows_one_class(parser: Any) -> bool:
    """Whether the parser shows the help of one class (`--model.help NAME`)."""
    return bool(getattr(parser, "_inner_parser", False))


def has_subcommands(parser: Any) -> bool:
    """Whether the parser is that of the whole program."""
    return parser._subcommands_action is not None


def load_plain(path: Any) -> Any:
    """Load a checkpoint from a file, path or URL without weights and without running code; Lightning's own reader."""
    from lightning.fabric.utilities.cloud_io import _load

    return _load(path, map_location="meta", weights_only=True)


def allow_instantiator(path: str) -> None:
    """Let a checkpoint be built by a function of this package; Lightning has a fixed list of two."""
    from lightning.pytorch.core import saving

    saving._ALLOWED_INSTANTIATORS.add(path)


def default_store() -> Any:
    """Return the key-value store of the process group, which works when the collectives do not any more."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def saves_in_this_epoch(callback: Any, trainer: Any) -> bool:
    """Whether a `ModelCheckpoint` saves in the current epoch; its own tests of this have no public name."""
    every = callback._every_n_epochs
    return not (every > 1 and (trainer.current_epoch + 1) % every) and not callback._should_skip_saving_checkpoint(
        trainer
    )


def save_if_new(callback: Any, trainer: Any) -> None:
    """Let a `ModelCheckpoint` save, unless it has saved this step; it has no public method for it."""
    if not callback._should_skip_saving_checkpoint(trainer):
        callback._save_topk_checkpoint(trainer, callback._monitor_candidates(trainer))


def ends_after_epoch(trainer: Any) -> bool:
    """Whether a training ends after the epoch that ends now; the public `fit_loop.done` changes the loop's progress."""
    loop = trainer.fit_loop
    steps_reached = 0 <= trainer.max_steps <= trainer.global_step
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    epochs_reached = 0 <= epochs <= loop.epoch_progress.current.processed
    return steps_reached or epochs_reached or bool(trainer.should_stop and loop._can_stop_early)


def has_validated(trainer: Any) -> bool:
    """Whether a validation of this fit has ended."""
    return bool(trainer.fit_loop.epoch_loop.val_loop._has_run)


def never_wrap(column: Any, **options: Any) -> None:
    """Keep a column of a rich progress bar on one line; `get_table_column` would have to be overridden for each."""
    from rich.table import Column

    column._table_column = Column(no_wrap=True, **options)


def set_launcher(strategy: Any, launcher: Any) -> None:
    """Replace the launcher of a strategy, which creates its own; there is no argument for it."""
    strategy._launcher = launcher


def set_number_of_threads(processes: int) -> None:
    """Set the number of threads of each process, as Lightning's launchers do before a run."""
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

    _set_num_threads_if_needed(num_processes=processes)


def __getattr__(name: str) -> Any:
    # The launcher behind `strategy: ddp`, to subclass; loaded on use, since this module is imported by all rooms.
    if name == "SubprocessScriptLauncher":
        return import_module("lightning.pytorch.strategies.launchers")._SubprocessScriptLauncher
    raise AttributeError(name)
