"""The `config.yaml` in a run's folder, and the run's settings in its checkpoints."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

# Where a checkpoint has the settings of its run.
RUN_KEY = "vlightning_run"
# Settings of the Trainer that shape the result, apart from the hardware.
LENGTHS = ("max_epochs", "max_steps")
SHAPING = (
    *(*LENGTHS, "min_epochs", "min_steps", "max_time", "precision"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
)


class SaveRunConfig(SaveConfigCallback):
    """Save the configuration that repeats the run when it is given to `--config`.

    The first run of a folder writes `config.yaml`, one that is resumed there `config-<n>.yaml`.

    Args:
        parser: The parser of the subcommand.
        config: Its full configuration, which Lightning passes.
        reproducible: The configuration to save: without what belongs to one run only.
        name: The run's name, for its checkpoints.
        on_begin: Called after every batch; the sanity check of the validation does not count.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        reproducible: Any,
        name: str,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(parser, reproducible, overwrite=True)
        self.run = {"trainer": shaping_settings(config.trainer), "compile": config.compile, "name": name}
        self.on_begin = on_begin

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the run's settings, so that `--ckpt_path` alone repeats them from wherever the file is."""
        checkpoint[RUN_KEY] = self.run

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Report that the run began."""
        if not trainer.sanity_checking:
            self.on_begin()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Report that the run began, unless this is the sanity check."""
        self.on_train_batch_end(trainer)

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Report that the run began."""
        self.on_train_batch_end(trainer)

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Report that the run began."""
        self.on_train_batch_end(trainer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose a free name, then save."""
        folder = trainer.log_dir
        if folder is not None and not self.already_saved and trainer.is_global_zero:
            number = 0
            while (Path(folder) / self.config_filename).exists():
                number += 1
                self.config_filename = f"config-{number}.yaml"
        super().setup(trainer, pl_module, stage)


def shaping_settings(trainer: Any) -> dict[str, Any]:
    """Return the Trainer's settings that shape the result, plain data, without those left to the Trainer.

    Args:
        trainer: The parsed arguments of the Trainer.
    """
    settings = {name: trainer.get(name) for name in SHAPING}
    if isinstance(settings["max_time"], datetime.timedelta):
        settings["max_time"] = {"seconds": int(settings["max_time"].total_seconds())}
    return {name: value for name, value in settings.items() if value is not None}
