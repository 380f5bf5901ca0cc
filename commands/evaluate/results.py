"""Results as JSON lines in DataComp's form, one set a line, and their aggregates."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...common.errors import UserError
from ...common.files import replacing
from .tasks import AGGREGATES, TASKS

ABSENT = "no set in"
"""Begin of `Result.missing` for a set that the folder of the sets lacks."""


@dataclass(frozen=True)
class Result:
    """The result of one set.

    Attributes:
        metrics: Metrics from 0 to 1, `main_metric` among them; empty for a set that is missing.
        bad: Number of samples that could not be used, by cause.
        named: Names of some of them.
        note: Caveat that reports print beside the metrics.
        missing: Why there are no metrics.
        seconds: Time that the set took.
    """

    key: str
    protocol: str
    metrics: Mapping[str, float]
    model: str
    sha256: str
    samples: int = 0
    bad: Mapping[str, int] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    note: str | None = None
    missing: str | None = None
    seconds: float = 0.0

    @property
    def main(self) -> float | None:
        """The main metric; None for a set that is missing."""
        return self.metrics.get("main_metric")

    @property
    def absent(self) -> bool:
        """Whether the folder of the sets lacks this set."""
        return self.main is None and str(self.missing).startswith(ABSENT)

    def line(self) -> dict[str, Any]:
        """Return the line of a file: DataComp's `key`, `dataset` and `metrics`, and what this package adds."""
        details = {name: value for name, value in vars(self).items() if name not in ("key", "metrics") and value}
        return {"key": self.key, "dataset": TASKS[self.key].name, "metrics": dict(self.metrics), **details}


def read_results(file: Path) -> list[Result]:
    """Read a file of results, of this package or of DataComp's code.

    Raises:
        UserError: If it is another file.
    """
    results = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.strip():
                continue
            row = json.loads(line)
            if row["key"] not in TASKS:
                continue
            fields = {name: row[name] for name in Result.__dataclass_fields__ if name in row}
            fields["named"] = tuple(fields.get("named", ()))
            defaults = {"protocol": "zero_shot", "model": file.stem, "sha256": ""}
            results.append(Result(**(defaults | fields)))
    except FileNotFoundError:
        raise UserError(f"Expected results as JSON lines, got no file {str(file)!r}: correct the path.") from None
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"Expected results as JSON lines in {str(file)!r}, got another file ({error}): correct it."
        ) from None
    return results


def write_results(file: Path, results: Iterable[Result]) -> None:
    """Write a file of results, complete or not at all."""
    with replacing(file) as staged:
        staged.write_text("".join(json.dumps(result.line()) + "\n" for result in results), encoding="utf-8")


class Aggregate(NamedTuple):
    """The mean of the main metrics of the evaluated sets, None without any; and numbers of these and of all sets."""

    name: str
    mean: float | None
    evaluated: int
    sets: int

    @property
    def complete(self) -> bool:
        """Whether no set is missing."""
        return self.evaluated == self.sets


def aggregates(results: Iterable[Result]) -> list[Aggregate]:
    """Return DataComp's aggregates of zero-shot results."""
    main = {r.key: r.main for r in results if r.protocol == "zero_shot" and r.main is not None}
    means = []
    for name, keys in AGGREGATES.items():
        values = [value for key in keys if (value := main.get(key)) is not None]
        means.append(Aggregate(name, sum(values) / len(values) if values else None, len(values), len(keys)))
    return means
