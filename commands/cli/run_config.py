"""The `config.yaml` and `environment.json` in a run's folder, and the run's settings in its checkpoints."""

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from re import match
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from typing_extensions import override

from ...common.shown import public
from ...common.urls import hidden
from .saved_run import MONITORED, RUN_KEY, SHAPING

# In C where libyaml is there: they take an eighth and a quarter of the time.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class SaveRunConfig(SaveConfigCallback):
    """Save the configuration that repeats the run when it is given to `--config`, and the environment of the run.

    The first run of a folder writes `config.yaml` and `environment.json`, one that is resumed there `config-<n>.yaml`
    and `environment-<n>.json`. Loggers show both, the configuration with the values that were taken from the data. None
    of them has secrets of URLs.

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
        super().__init__(parser, hidden(reproducible), overwrite=True)
        self.run = {"trainer": shaping_settings(config.trainer), "compile": config.compile, "name": name}
        self.run["checkpoint"] = {name: config.checkpoint[name] for name in MONITORED}
        self.on_begin = on_begin
        self.resolved = config

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the run's settings, so that `--ckpt_path` alone repeats them from wherever the file is."""
        checkpoint[RUN_KEY] = self.run

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Report that the run began, unless this is the sanity check of the validation."""
        if not trainer.sanity_checking:
            self.on_begin()

    on_validation_batch_end = on_train_batch_end
    on_test_batch_end = on_train_batch_end
    on_predict_batch_end = on_train_batch_end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose a free name, then save."""
        folder = trainer.log_dir
        if folder is not None and not self.already_saved and trainer.is_global_zero:
            number = 0
            while (Path(folder) / self.config_filename).exists():
                number += 1
                self.config_filename = f"config-{number}.yaml"
            self.environment_file = Path(folder, self.config_filename.replace("config", "environment")).with_suffix(
                ".json"
            )
        super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        started_with = environment(Path.cwd())
        self.environment_file.write_text(f"{json.dumps(started_with, indent=2)}\n", encoding="utf-8")
        if any(isinstance(logger, (TensorBoardLogger, WandbLogger)) for logger in trainer.loggers):
            resolved = self.parser.dump(self.resolved, skip_none=False)
            log_settings(trainer, "config", yaml.load(resolved, Loader=_LOADER))
        log_settings(trainer, "environment", started_with)


def shaping_settings(trainer: Any) -> dict[str, Any]:
    """Return the parsed settings of the Trainer that shape the result, as plain data, without those that are None."""
    settings = {name: trainer.get(name) for name in SHAPING}
    if isinstance(settings["max_time"], datetime.timedelta):
        settings["max_time"] = {"seconds": int(settings["max_time"].total_seconds())}
    return {name: value for name, value in settings.items() if value is not None}


def environment(folder: Path) -> dict[str, Any]:
    """Return the command, the versions, and git's commit with the names of changed files, None outside a repository.

    The command has no secrets of URLs.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    git = None
    if commit is not None and changed is not None:
        git = {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}
    return {
        "command": [public(word) for word in sys.argv],
        "python": platform.python_version(),
        "packages": _versions("vlightning"),
        "git": git,
    }


def _versions(package: str) -> dict[str, str]:
    """Return the installed versions of a package and of what it requires, extras included."""
    try:
        needed = [match(r"[\w.-]+", line) for line in requires(package) or ()]
    except PackageNotFoundError:
        return {}
    versions = {}
    for name in sorted({package, *(each.group() for each in needed if each is not None)}):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # an extra
            continue
    return versions


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None without git, outside a repository, or if git takes long."""
    try:
        return subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def log_settings(trainer: Trainer, name: str, settings: Mapping[str, Any]) -> None:
    """Show plain settings without secrets of URLs: as text in TensorBoard, in W&B's config; only rank 0 calls this.

    A CSV log has none, since its folder is that of the files.
    """
    settings = hidden(settings)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            text = yaml.dump(dict(settings), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
            logger.experiment.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), 0)
        elif isinstance(logger, WandbLogger):
            logger.experiment.config.update({name: dict(settings)}, allow_val_change=True)
