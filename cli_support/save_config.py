"""The `config.yaml` in a run's folder: what reproduces the run when it is given to `--config`."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback


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
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, reproducible: Any) -> None:
        super().__init__(parser, reproducible, overwrite=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose a free name, then save."""
        folder = trainer.log_dir
        if folder is not None and not self.already_saved and trainer.is_global_zero:
            number = 0
            while (Path(folder) / self.config_filename).exists():
                number += 1
                self.config_filename = f"config-{number}.yaml"
        super().setup(trainer, pl_module, stage)
