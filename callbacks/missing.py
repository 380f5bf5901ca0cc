"""What a LightningModule returns from `configure_callbacks`."""

from collections.abc import Iterable

from lightning.pytorch import Callback


def missing_callbacks(present: Iterable[Callback], *candidates: Callback) -> list[Callback]:
    """Returns the candidates whose class has no instance yet, neither of itself nor of a subclass.

    Lightning silently replaces a callback of the user by one of the same class that the module returns, and runs both
    where the user's is a subclass. In a module:

        def configure_callbacks(self) -> list[Callback]:
            return missing_callbacks(self.trainer.callbacks, EMACallback(), QueueCallback())

    Args:
        present: The callbacks that the Trainer already has.
        *candidates: Those that the module cannot run without, in order.
    """
    present = list(present)
    return [candidate for candidate in candidates if not any(isinstance(there, type(candidate)) for there in present)]
