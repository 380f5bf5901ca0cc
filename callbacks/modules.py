"""Helpers for callbacks and LightningModules: submodules by path, eval mode, accumulation, default callbacks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ..common.errors import UserError
from ..common.names import did_you_mean


def find_module(root: nn.Module, path: str, kind: type[nn.Module], asked_by: str) -> Any:
    """Return the submodule at a dotted attribute path.

    Args:
        root: Where the path starts, usually the LightningModule.
        path: Attribute names joined by dots, such as `text_encoder.bert`.
        kind: Expected class.
        asked_by: What needs the submodule, for the error message, such as `source of the EMA pair 'image'`.

    Returns:
        The attribute, an instance of `kind`.

    Raises:
        UserError: If a name on the path does not exist, or the path ends at an instance of another class.
    """
    module: Any = root
    for depth, name in enumerate(path.split(".")):
        if not hasattr(module, name):
            where = ".".join([type(root).__name__, *path.split(".")[:depth]])
            children = [child for child, _ in module.named_children()] if isinstance(module, nn.Module) else []
            raise UserError(
                f"Expected a submodule at the path {path!r} (the {asked_by}), got no {name!r} in {where}: "
                f"{did_you_mean(name, children)}"
            )
        module = getattr(module, name)
    if not isinstance(module, kind):
        raise UserError(
            f"Expected a {kind.__name__} at the path {path!r} (the {asked_by}), got a {type(module).__name__}: give "
            f"the path of a {kind.__name__}."
        )
    return module


def blocks_of(network: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the blocks in all lists of blocks of a network, inner blocks first.

    A list is an `nn.ModuleList`, or an `nn.Sequential` of several blocks of one class.
    """
    for module in reversed(list(network.modules())):
        alike = isinstance(module, nn.Sequential) and len(module) > 1 and len({type(block) for block in module}) == 1
        if isinstance(module, nn.ModuleList) or alike:
            yield from (block for block in module.children() if not isinstance(block, nn.ModuleList | nn.ModuleDict))


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module can have running statistics, as BatchNorm of any kind can."""
    return hasattr(module, "running_mean")  # None if it does not track them


def is_last_batch(trainer: Trainer) -> bool:
    """Return whether the current training batch is the last of its epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.is_last_batch or progress.current.ready == trainer.num_training_batches


def accumulates(trainer: Trainer) -> bool:
    """Return whether the current training batch only accumulates gradients, as Lightning (2.6.6) decides it."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if ready % trainer.accumulate_grad_batches == 0:
        return False
    return trainer.strategy.handles_gradient_accumulation or not is_last_batch(trainer)


def state_key(callback: Callback, **settings: Any) -> str:
    """Return the key of a callback's state in the form that Lightning documents: the class and its settings."""
    return f"{type(callback).__qualname__}{settings!r}"


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module to eval mode, and restore the mode of each submodule afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


def features_of(trainer: Trainer, encode: Callable[[Tensor], Any], image: Tensor) -> Tensor:
    """Encode images in the precision of the trainer.

    Args:
        trainer: Decides the precision.
        encode: A method that returns features, or a tuple that starts with them.
        image: Images [B, 3, H, W], on the module's device.

    Returns:
        The features.
    """
    with trainer.precision_plugin.forward_context():
        features = on_any_rows(encode, trainer.precision_plugin.convert_input(image))
    encoded: Tensor = features[0] if isinstance(features, tuple) else features
    return encoded


def on_any_rows(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Call a function on a batch that may be empty, for which it is called on a dummy row.

    A batch without texts or images occurs where a folder holds images alone, and in a process whose samples are
    unusable. Layers with attention cannot reshape it, and sharded processes have to run the same layers.

    Args:
        function: Tensors with equally many rows in; a tensor with a row dimension out, or a tuple of such and None.
        *inputs: Tensors [B, ...].

    Returns:
        What the function returns, with B rows.
    """
    if len(inputs[0]):
        return function(*inputs)
    outputs = function(*(part.new_ones(1, *part.shape[1:]) for part in inputs))
    return outputs[:0] if isinstance(outputs, Tensor) else tuple(part if part is None else part[:0] for part in outputs)


def missing_callbacks(present: Iterable[Callback], *candidates: Callback) -> list[Callback]:
    """Return the candidates that are missing: no callback of their class, or of a subclass, is present.

    Lightning silently replaces a user's callback by one of the same class that the module returns, and runs both if the
    user's is of a subclass. In a module:

        def configure_callbacks(self) -> list[Callback]:
            return missing_callbacks(self.trainer.callbacks, EMACallback(), QueueCallback())

    Args:
        present: Callbacks of the Trainer.
        *candidates: Callbacks that the module needs, in order.
    """
    present = list(present)
    return [candidate for candidate in candidates if not any(isinstance(there, type(candidate)) for there in present)]


def chance_levels(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Return the chance levels that a module's evaluation and the callbacks state, by metric without the stage."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    summary: Any = getattr(getattr(module, "evaluation", None), "summary", None)
    stated = [*(getattr(callback, "chance", {}) for callback in callbacks), getattr(summary, "chance", {})]
    return {name: float(level) for levels in stated for name, level in levels.items()}
