"""The Python files of the package, as syntax trees."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("callbacks", "commands", "common", "datamodules", "lightning_modules", "metrics")


def package_files() -> list[Path]:
    """Every Python file of the package, without tests and benchmarks."""
    inside = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [ROOT / "__init__.py", ROOT / "api.py", ROOT / "cli.py", *inside]


TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in package_files()}
"""The tree of each file, by its path relative to the root."""
