"""What the parts of `benchmarks/gpu.sh` share: options, device, tables."""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchvision", "lightning", "timm", "transformers", "open_clip_torch", "jsonargparse", "datasets")


@dataclass
class Setting:
    """Options of a part.

    Attributes:
        pretend: whether to run on the CPU at toy sizes.
        out: file of the table.
        only: a part of the names of the cases to measure; None measures all.
    """

    pretend: bool
    out: Path
    only: str | None

    @classmethod
    def parsed(cls, description: str | None) -> "Setting":
        """Parse the command line, and begin the file with the versions and the device."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--pretend", action="store_true", help="run on the CPU at toy sizes")
        parser.add_argument("--out", type=Path, required=True, help="file of the table")
        parser.add_argument("--only", help="a part of the names of the methods to measure")
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
        """Return the versions, the device and the missing packages in a line."""
        found, missing = [f"Python {platform.python_version()}"], list[str]()
        for name in PACKAGES:
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                missing.append(name)
        device = "CPU, toy sizes (pretended)" if self.pretend else torch.cuda.get_device_name()
        return f"{device}; {', '.join(found)}; missing: {', '.join(missing) or 'none'}\n"

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
