"""What modules have in common that learn from a frozen teacher."""

from typing import Any

from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from .frozen import FrozenTeacher


class TaughtModule(LightningModule):
    """A LightningModule with a `FrozenTeacher`, whose network may be loaded in `setup` or later, or never.

    Its checkpoints name the teacher, and a run says who teaches.
    """

    teacher: FrozenTeacher[Any]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the teacher, and what its weights were."""
        self.teacher.save_record(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the teacher with that of the checkpoint.

        Raises:
            ValueError: if its weights are others.
        """
        super().on_load_checkpoint(checkpoint)
        self.teacher.compare(checkpoint)

    def on_train_start(self) -> None:
        """Say who teaches."""
        super().on_train_start()
        if self.teacher.origin is not None:
            rank_zero_info(f"The teacher is {self.teacher.origin['name']} of {self.teacher.origin['weights']!r}.")
