"""What the parts of `benchmarks/gpu.sh` share: options, device, tables."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGES = {
    name: name for name in ("torch", "torchvision", "lightning", "timm", "transformers", "jsonargparse", "datasets")
} | {"open_clip": "open_clip_torch"}
"""Packages by the names of their modules."""
BUDGET = float(os.environ.get("VLIGHTNING_PART_SECONDS", "260")) - 20  # of a part, before `gpu.sh` ends it


@dataclass
class Setting:
    """Options of a part.

    Attributes:
        pretend: whether to run on the CPU at toy sizes.
        out: file of the table.
        only: parts of the names of the cases to measure, with commas between them; None measures all.
    """

    pretend: bool
    out: Path
    only: str | None
    start: float = field(default_factory=time.monotonic)
    longest: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parsed(cls, description: str | None) -> "Setting":
        """Parse the command line, and begin the file with the versions and the device."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--pretend", action="store_true", help="run on the CPU at toy sizes")
        parser.add_argument("--out", type=Path, required=True, help="file of the table")
        parser.add_argument("--only", help="parts of the names to measure, such as albef,shre")
        setting = cls(**vars(parser.parse_args()))
        if not setting.pretend and not torch.cuda.is_available():
            sys.exit("Expected a CUDA device, got none: add --pretend to run on the CPU at toy sizes.")
        setting.out.write_text("")
        setting.say(setting.header())
        return setting

    @property
    def device(self) -> torch.device:
        """The device of all measurements."""
        return torch.device("cpu" if self.pretend else "cuda")

    def header(self) -> str:
        """Return the device, the missing packages and the versions in a line."""
        missing = [package for name, package in PACKAGES.items() if not has(name)]
        found = [f"{package} {version(package)}" for package in PACKAGES.values() if package not in missing]
        device = "CPU, toy sizes (pretended)" if self.pretend else torch.cuda.get_device_name()
        python = f"Python {platform.python_version()}"
        return f"{device}; missing packages: {', '.join(missing) or 'none'}; {', '.join([python, *found])}\n"

    def chooses(self, name: str) -> bool:
        """Return whether a name is to be measured."""
        return self.only is None or any(part.lower() in name.lower() for part in self.only.split(","))

    def left(self) -> float:
        """Return the seconds that this part has left."""
        return BUDGET - (time.monotonic() - self.start)

    def measured(self, kind: str, expected: float, measure: Callable[[], None], table: "Table", name: str) -> None:
        """Measure if the time that is left is enough for it, and otherwise say in the table that it was left out.

        An error becomes a row of the table too.

        Args:
            kind: of measurements that take about as long.
            expected: seconds of the first of them.
            measure: writes its rows.
            table: the table.
            name: of the row.
        """
        if self.left() < self.longest.get(kind, 0.0 if self.pretend else expected):
            table.row(name, "left out: no time (--only=METHOD measures it)")
            return
        start = time.monotonic()
        try:
            measure()
        except Exception as error:
            table.failed(name, error)
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - start)

    def say(self, line: str) -> None:
        """Print a line and append it to the file at once, so that a part that is stopped leaves what it has."""
        sys.stdout.write(f"{line}\n")
        with self.out.open("a") as file:
            file.write(f"{line}\n")

    def table(self, columns: Sequence[str]) -> "Table":
        """Begin a Markdown table."""
        self.say(f"| {' | '.join(columns)} |")
        self.say("|" + "---|" * len(columns))
        return Table(self, len(columns))

    def wait(self) -> None:
        """Wait until the device has finished."""
        if not self.pretend:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any]) -> float:
        """Return the seconds of a call, to the end of its work on the device."""
        self.wait()
        start = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - start

    def matmul_rate(self) -> float:
        """Return the rate of a large bf16 matrix product in flop/s, the best of five."""
        size = 256 if self.pretend else 8192
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(3):
            left @ right
        return 2 * size**3 / min(self.seconds(lambda: left @ right) for _ in range(5))


def has(module: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


class Table:
    """A Markdown table that grows row by row."""

    def __init__(self, setting: Setting, columns: int) -> None:
        self.setting = setting
        self.columns = columns

    def row(self, *cells: Any) -> None:
        """Append a row; numbers are rounded to three digits."""
        shown = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        self.setting.say(f"| {' | '.join([*shown, *[''] * (self.columns - len(shown))])} |")

    def failed(self, name: str, error: Exception) -> None:
        """Append a row that says why a measurement is missing."""
        what = str(error).splitlines()[0][:120] if str(error) else ""
        self.row(name, f"{type(error).__name__}: {what}")
