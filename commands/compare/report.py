"""Tables and a figure of a comparison: mean, deviation, and differences from a baseline seed by seed."""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...common.files import replacing
from .training import Outcome

Outcomes = Mapping[str, Sequence[Outcome]]
"""Outcomes of the seeds of each variant."""
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5% quantiles of Student's t distribution with 1 to 30 degrees of freedom."""


def interval(differences: Sequence[float]) -> float:
    """Return half of the width of the 95% t-interval of the mean of paired differences; infinite for a single one."""
    freedom = len(differences) - 1
    if freedom < 1:
        return math.inf
    quantile = T_975[min(freedom, len(T_975)) - 1]
    return quantile * statistics.stdev(differences) / math.sqrt(len(differences))


def spread(values: Sequence[float | None]) -> str:
    """Format mean and standard deviation; empty for a metric that the runs do not have."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    deviation = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.2f}{deviation}"


def difference(values: Sequence[float]) -> str:
    """Format the mean of paired differences with its 95% interval; empty without a difference."""
    if not values:
        return ""
    half = interval(values)
    mean = statistics.mean(values)
    return f"{mean:+.2f}" if math.isinf(half) else f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def paired(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> str:
    """Format the mean of the differences from a baseline, seed by seed, with its 95% interval."""
    others = {outcome.run.seed: _value(outcome) for outcome in baseline}
    return difference([_value(outcome) - others[outcome.run.seed] for outcome in outcomes])


def _value(outcome: Outcome) -> float:
    """Return the value that variants are compared by: that of the test, if there was one, or of the last validation."""
    return outcome.last if outcome.tested is None else outcome.tested


def table(outcomes: Outcomes, baseline: str) -> str:
    """Return the table in Markdown, a row for each variant."""
    first = next(iter(outcomes.values()))[0]
    name = first.metric.name
    tested = first.tested is not None
    titles = ["", f"{name}, last", f"{name}, best", *([f"test {name.partition('/')[2]}"] * tested)]
    titles += [f"less {baseline}", "values", "minutes", "seeds"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for variant, runs in outcomes.items():
        cells = [variant, spread([run.last for run in runs]), spread([run.best for run in runs])]
        cells += [spread([_value(run) for run in runs])] * tested
        cells.append("" if variant == baseline else paired(runs, outcomes[baseline]))
        cells.append(", ".join(f"{option.rpartition('.')[2]} {value}" for option, value in runs[0].run.values))
        cells.append(f"{statistics.mean(run.seconds for run in runs) / 60:.1f}")
        cells.append(", ".join(str(run.run.seed) for run in runs))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_rows(path: Path, outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> None:
    """Write a row for each run, those of a search too.

    Args:
        path: the CSV file.
        outcomes: of all runs.
        baseline: of the seeds of the baseline; the column `less_baseline` is the difference from that of the same seed.
    """
    values_of_baseline = {outcome.run.seed: _value(outcome) for outcome in baseline}
    options = list(dict.fromkeys(option for outcome in outcomes for option, _ in outcome.run.values))
    with replacing(path) as staged, staged.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        titles = ["variant", *options, "seed", "metric", "last", "best", "test", "less_baseline", "steps", "seconds"]
        writer.writerow([*titles, "folder"])
        for outcome in outcomes:
            values = dict(outcome.run.values)
            columns = [outcome.run.variant.name, *(values.get(option, "") for option in options), outcome.run.seed]
            columns += [outcome.metric.name, outcome.last, outcome.best, outcome.tested]
            other = values_of_baseline.get(outcome.run.seed)
            columns.append(None if other is None else _value(outcome) - other)
            writer.writerow([*columns, outcome.curve[-1][0], round(outcome.seconds, 1), outcome.folder])


def draw(path: Path, outcomes: Outcomes) -> None:
    """Draw the metric over the steps, the mean of the seeds with a band from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for variant, runs in outcomes.items():
        values: dict[int, list[float]] = {}
        for run in runs:
            for step, value in run.curve:
                values.setdefault(step, []).append(value)
        steps = sorted(step for step in values if len(values[step]) == len(runs))
        (line,) = axes.plot(steps, [statistics.mean(values[step]) for step in steps], marker=".", label=variant)
        lowest = [min(values[step]) for step in steps]
        highest = [max(values[step]) for step in steps]
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(next(iter(outcomes.values()))[0].metric.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as staged, staged.open("wb") as file:
        figure.savefig(file, format="png", dpi=120)
