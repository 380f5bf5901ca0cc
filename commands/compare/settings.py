"""What `vlightning compare` compares: configs, values of options that are tried, and seeds."""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import UserError
from ...common.names import did_you_mean
from ..cli.listing import PACKAGE_ROOT, configs

Values = Mapping[str, str]
"""Values of the options that are tried, by option without dashes."""


@dataclass(frozen=True)
class Variant:
    """What is trained with each seed: config files that `fit` reads in this order, under a name."""

    name: str
    files: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Read `[NAME=]FILE[+FILE...]`; the name is by default that of the last file, without its ending.

        Raises:
            UserError: If a file is missing.
        """
        name, equals, listed = text.rpartition("=")
        files = tuple(listed.split("+"))
        for file in files:
            if not (Path(file).is_file() or (PACKAGE_ROOT / file).is_file()):
                nearest = did_you_mean(file, (config.path for config in configs()))
                raise UserError(f"Expected a config file, got {file!r}, which does not exist: {nearest}")
        return cls(name if equals else Path(files[-1]).stem, files)


@dataclass(frozen=True)
class Range:
    """Values between two numbers, drawn uniformly by their logarithms."""

    low: float
    high: float


@dataclass(frozen=True)
class Sweep:
    """An option and what is tried of it: values as they are typed, or a range."""

    option: str
    values: tuple[str, ...] | Range

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """Read `OPTION=VALUE,VALUE...` or `OPTION=LOW..HIGH`.

        Raises:
            UserError: If it is neither, or a range is not of two positive numbers, the lower one first.
        """
        option, equals, values = text.removeprefix("--").partition("=")
        if not equals or not option or not values:
            raise UserError(f"Expected --sweep OPTION=VALUE,VALUE or OPTION=LOW..HIGH, got {text!r}.")
        if ".." not in values:
            return cls(option, tuple(values.split(",")))
        low, _, high = values.partition("..")
        try:
            limits = Range(float(low), float(high))
        except ValueError:
            raise UserError(f"Expected two numbers in --sweep {option}=LOW..HIGH, got {values!r}.") from None
        if not 0 < limits.low < limits.high:
            raise UserError(f"Expected 0 < LOW < HIGH in --sweep {option}=LOW..HIGH, got {values!r}.")
        return cls(option, limits)


def grid(sweeps: Sequence[Sweep]) -> list[dict[str, str]]:
    """Return each combination of the values; one without values if there is no sweep.

    Raises:
        UserError: If one of them is a range.
    """
    listed = []
    for sweep in sweeps:
        if isinstance(sweep.values, Range):
            raise UserError(
                f"Expected --trials with the range of {sweep.option}, got none: give a number of trials, or values "
                "separated by commas."
            )
        listed.append([(sweep.option, value) for value in sweep.values])
    return [dict(values) for values in itertools.product(*listed)]


@dataclass(frozen=True)
class Run:
    """A training: a variant, the values that are tried, and a seed."""

    variant: Variant
    values: tuple[tuple[str, str], ...]
    seed: int

    @property
    def folder_name(self) -> str:
        """Name of its folder, readable and different from those of all other runs."""
        text = ",".join(f"{option.rpartition('.')[2]}={value}" for option, value in self.values)
        readable = re.sub(r"[^\w.=,-]+", "_", f"{self.variant.name}{',' if text else ''}{text}")[:100]
        digest = hashlib.sha256(repr((self.variant.name, self.values)).encode()).hexdigest()[:6]
        return f"{readable}_{digest}/seed{self.seed}"

    def arguments(self, shared: Sequence[str]) -> list[str]:
        """Return the arguments of `vlightning fit`.

        Args:
            shared: arguments of every run.
        """
        words = [f"--config={file}" for file in self.variant.files]
        swept = [f"--{option}={value}" for option, value in self.values]
        return [*words, *shared, *swept, f"--seed_everything={self.seed}"]
