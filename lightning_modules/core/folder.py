"""Reading of an exported folder: configuration and state."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...common.errors import UserError

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def is_folder(path: Path) -> bool:
    """Return whether a path is an exported folder."""
    return (path / CONFIG_FILE).is_file()


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the state of an exported folder.

    Raises:
        UserError: If the folder is not an export, or is damaged.
    """
    config = read_config(folder)
    try:
        return config, load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise _damaged(folder, error) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an exported folder.

    Raises:
        UserError: If the folder is not an export, or is damaged.
    """
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"Expected the folder of an export, got {str(folder)!r} without {' and without '.join(missing)}: correct "
            "the path, or write an export with `vlightning export`."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(folder, error) from error
    if not isinstance(config, dict) or not {"class", "vlightning_version", "arguments"} <= config.keys():
        raise UserError(
            f"Expected the {CONFIG_FILE} of an export in {str(folder)!r}, got another file: correct the path."
        )
    return config


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"Expected a readable export in {str(folder)!r}, got a damaged one ({error}): export it again.")
