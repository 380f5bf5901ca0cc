"""A module in the state of a run, without data and weights; needs no parser of a command line, which a GPU may lack."""

from types import SimpleNamespace
from typing import Any

from ...lightning_modules.base.method import Method
from ...lightning_modules.core.frozen import without_weights

_HALF = (0.5, 0.5, 0.5)


def pretend_run(module: Any) -> None:
    """Let a module find a Trainer in the middle of a run, and log nothing."""
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=1))
    module.pretended_run = SimpleNamespace(  # referred to here, since Lightning keeps a weak reference
        datamodule=SimpleNamespace(preprocessing={"mean": _HALF, "std": _HALF}),
        callbacks=[],
        strategy=SimpleNamespace(restore_checkpoint_after_setup=False),
        num_training_batches=1,
        fit_loop=loop,
        global_step=1,
        max_steps=2,
        estimated_stepping_batches=2,
        world_size=1,
        is_global_zero=True,
        sanity_checking=False,
    )
    module.trainer = module.pretended_run
    module.log = module.log_dict = lambda *_, **__: None


def has_plan(cls: type[Any]) -> bool:
    """Return whether a class of a module defines an `example_batch`, which a plan needs."""
    return issubclass(cls, Method) and cls.trains and cls.example_batch is not Method.example_batch


def start(module: Method) -> None:
    """Build what a fit builds, without data and weights.

    Raises:
        UserError: If its sizes depend on the data.
    """
    pretend_run(module)
    with without_weights():
        module.start_example()
    module.configure_model()
    module.train()
