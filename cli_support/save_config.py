"""The `config.yaml` in a run's folder: what reproduces the run when it is given to `--config`."""

import copy
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

# Where a checkpoint has the settings of its run.
RUN_KEY = "vlightning_run"
# Settings of the Trainer that shape what is trained, apart from where.
LENGTHS = ("max_epochs", "max_steps")
SHAPING = (
    *(*LENGTHS, "min_epochs", "min_steps", "max_time", "precision"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
)


@dataclass
class Claimed:
    """The folder of a run.

    Args:
        folder: The folder.
        made: What was made for it, the folder first; nothing where it was there before.
        began: Whether a batch has gone through the model.
    """

    folder: Path
    made: list[Path]
    began: bool = False


def shaping_settings(config: Namespace) -> dict[str, Any]:
    """The Trainer's settings that shape the result, plain data, without those that are left to the Trainer.

    Args:
        config: The parsed configuration of the subcommand.
    """
    settings = {name: config.trainer.get(name) for name in SHAPING}
    if isinstance(settings["max_time"], datetime.timedelta):
        settings["max_time"] = {"seconds": int(settings["max_time"].total_seconds())}
    return {name: value for name, value in settings.items() if value is not None}


def reproducible(config: Namespace, without: Sequence[str]) -> Namespace:
    """A copy of a configuration that can be run again: without the folder of this run.

    Args:
        config: The parsed configuration of the subcommand.
        without: Keys to leave out: what follows from other values.
    """
    copied = copy.deepcopy(config)
    for key in without:
        copied.pop(key, None)
    if copied.get("trainer.logger.init_args.version") is not None:
        copied["trainer.logger.init_args.version"] = None
    return copied


class SaveRunConfig(SaveConfigCallback):
    """Save the configuration as it was before the command line filled in what belongs to this one run.

    The version folder is left out, or the saved file could not be run again; so are the module's arguments that follow
    the data's. A run that goes on in its folder keeps the first file and adds `config-<n>.yaml`.

    Args:
        parser: The parser of the subcommand.
        config: Its full configuration, which Lightning passes.
        reproducible: The configuration to save.
        run: What a checkpoint is to say of the run, plain data.
        claimed: The run's folder, which is told when the run has begun; None without one.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        reproducible: Any,
        run: dict[str, Any],
        claimed: Claimed | None = None,
    ) -> None:
        super().__init__(parser, reproducible, overwrite=True)
        self.run = run
        self.claimed = claimed

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the run's settings, so that `--ckpt_path` alone repeats them, wherever the file is by then."""
        checkpoint[RUN_KEY] = self.run

    def on_train_batch_end(self, *args: Any) -> None:
        """Remember that the run began; one that did not leaves no folder."""
        if self.claimed is not None:
            self.claimed.began = True

    def on_test_batch_end(self, *args: Any) -> None:
        """As in training."""
        self.on_train_batch_end()

    def on_predict_batch_end(self, *args: Any) -> None:
        """As in training."""
        self.on_train_batch_end()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """As in training, apart from the check of the validation before it."""
        if not trainer.sanity_checking:
            self.on_train_batch_end()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose a free name, then save."""
        folder = trainer.log_dir
        if folder is not None and not self.already_saved and trainer.is_global_zero:
            number = 0
            while (Path(folder) / self.config_filename).exists():
                number += 1
                self.config_filename = f"config-{number}.yaml"
        super().setup(trainer, pl_module, stage)
