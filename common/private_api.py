"""Every private name of Lightning, torch, jsonargparse and argparse in this folder, `callbacks/` and `commands/`.

Each is used here once, with the reason why no public name is sufficient and the public request that would end it, or
"not requested yet". Checked with Lightning 2.6.6. Names that cannot be wrapped, since subclasses override them or
strings contain them, are in `ELSEWHERE`.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

ELSEWHERE = {
    "LightningCLI._parse_ckpt_path": "parses a checkpoint's hyper-parameters over what was typed; the command line "
    "reads them before, so that typed values override (Lightning-AI/pytorch-lightning#21455)",
    "LightningCLI._instantiate_trainer": "the only place where the Trainer's arguments are complete and its callbacks "
    "can be added to (not requested yet)",
    "LightningCLI._run_subcommand": "the only place around the run itself (not requested yet)",
    "DefaultHelpFormatter._get_help_string": "lists every imported subclass of a type (not requested yet)",
    "_SubprocessScriptLauncher._call_children_scripts": "starts the processes without the thread that kills this one "
    "without a message (Lightning-AI/pytorch-lightning#17248)",
    "ModelParallelStrategy._data_parallel_size": "the number of processes is known only in `setup_environment`, after "
    "the constructor (not requested yet)",
    "_orig_mod, _checkpoint_wrapped_module": "names in the state dict that `torch.compile` and activation "
    "checkpointing add (not requested yet)",
}


def constructor_parameters(cls: type) -> list[Any]:
    """Return a class's constructor parameters as the parser sees them, each with name, annotation, default and kind.

    `inspect.signature` shows `**kwargs` in place of the arguments of the base class that it passes on to. Not
    requested yet.
    """
    from jsonargparse._parameter_resolvers import get_signature_parameters

    return list(get_signature_parameters(cls, None, logger=False))


def parser_actions(parser: Any) -> list[Any]:
    """Return the options of a parser; argparse lists them nowhere else. Not requested yet."""
    return list(parser._actions)


def option_type(action: Any) -> Any:
    """Return the type of an option's value; `action.type` is None for types that are no classes. Not requested yet."""
    return getattr(action, "_typehint", action.type)


def take_text_verbatim(action: Any) -> None:
    """Stop an option from replacing the name of a file by the file's content.

    `add_argument` has the argument `enable_path`; classes and functions add theirs without. Not requested yet.
    """
    action._enable_path = False


def groups_of_options(parser: Any) -> list[tuple[Any, list[Any]]]:
    """Return the groups of a parser's help, each with its options; `sort_groups` reorders them. Not requested yet."""
    return [(group, group._group_actions) for group in parser._action_groups]


def sort_groups(parser: Any, key: Any) -> None:
    """Reorder the groups of a parser's help; argparse keeps the order in which they were added. Not requested yet."""
    parser._action_groups.sort(key=key)


def shows_one_class(parser: Any) -> bool:
    """Return whether the parser shows the help of one class (`--model.help NAME`). Not requested yet."""
    return bool(getattr(parser, "_inner_parser", False))


def allow_instantiator(path: str) -> None:
    """Let a checkpoint be built by a function of this package; Lightning has a fixed list of two. Not requested yet."""
    from lightning.pytorch.core import saving

    saving._ALLOWED_INSTANTIATORS.add(path)


def save_if_new(callback: Any, trainer: Any) -> None:
    """Let a `ModelCheckpoint` save, unless it has saved this step; only its hooks do (Lightning #8126, closed)."""
    import torch

    if not callback._should_skip_saving_checkpoint(trainer):
        counts = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
        callback._save_topk_checkpoint(trainer, trainer.callback_metrics | counts)


def set_launcher(strategy: Any, launcher: Any) -> None:
    """Replace the launcher of a strategy, which creates its own (Lightning-AI/pytorch-lightning#17248)."""
    strategy._launcher = launcher


def validates_next(trainer: Any) -> bool:
    """Return whether a validation follows the current batch: Lightning's decision depends on six settings.

    Its argument tells training steps that take the iterator of the loader (`dataloader_iter`). Not requested yet.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return bool(trainer.enable_validation and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))


def steps_taken(trainer: Any) -> int:
    """Return the number of batches of the run that were not only accumulated, under which Lightning logs metrics.

    `trainer.global_step` counts the steps of each optimizer. Not requested yet.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def unscales_gradients(optimizer: Any) -> bool:
    """Return whether an optimizer divides gradients by the loss scale itself. Not requested yet."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_found_inf(optimizer: Any, found_inf: Any) -> None:
    """Set the flag, 0-D, with which an optimizer of `unscales_gradients` skips its step; None removes this flag.

    `GradScaler` sets it beside `grad_scale`, and removes both. Not requested yet.
    """
    if found_inf is not None:
        optimizer.found_inf = found_inf
    elif hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale"):
        del optimizer.found_inf


def averaged_model(callback: Any) -> Any:
    """Return the `AveragedModel` of Lightning's weight averaging, from its `setup` on. Not requested yet."""
    return callback._average_model


def ignored_by_ddp(module: Any) -> list[str]:
    """Return the names that DDP does not broadcast; DDP reads this attribute (pytorch/pytorch#43690)."""
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(module: Any, buffers: Iterable[str]) -> None:
    """Exclude further buffers from DDP's broadcast (pytorch/pytorch#43690)."""
    module._ddp_params_and_buffers_to_ignore = sorted({*ignored_by_ddp(module), *buffers})


def compiles_itself(module: Any) -> bool:
    """Return whether `Module.compile` was called on a module; torch marks it privately only. Not requested yet."""
    return module._compiled_call_impl is not None


_CLASSES = {
    # The launcher behind `strategy: ddp`, to subclass (Lightning-AI/pytorch-lightning#17248).
    "SubprocessScriptLauncher": ("lightning.pytorch.strategies.launchers", "_SubprocessScriptLauncher"),
    # A context that sees each operation: torch documents the class, in a module with a private name (not requested).
    "DispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
}


def __getattr__(name: str) -> Any:
    # Classes are loaded when they are used, since every folder imports this module.
    if name not in _CLASSES:
        raise AttributeError(name)
    module, private_name = _CLASSES[name]
    return getattr(import_module(module), private_name)
