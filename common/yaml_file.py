"""Reading a YAML file."""

from pathlib import Path
from typing import Any

import yaml

from .errors import UserError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of `key: value` lines; an empty one gives no keys.

    Raises:
        UserError: If it cannot be read, is not YAML, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"Expected valid YAML in {path}{where}, got an error ({problem}): correct the file.") from error
    if not isinstance(content, dict | None):
        raise UserError(f"Expected `key: value` lines in {path}, got a {type(content).__name__}: correct the file.")
    return {str(key): value for key, value in (content or {}).items()}
