r"""Write the tables and the figures of the proof runs from their files of results, and say what is out of date.

    python benchmarks/proof/tables.py

A page holds the tables of a claim between `<!-- proof: NAME -->` and `<!-- end of proof -->`. Nothing here trains: the
files in `docs/results/` are all that is read.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from proof.claim import Budget, Claim, filled, load_claim
from proof.hashes import changes
from proof.plan import best_rate
from proof.results import RESULTS, Line, read_lines

DOCS = RESULTS.parent
IMAGES = DOCS / "images"
ACCEPTED = RESULTS / "accepted_changes.json"
"""Changes of files of a step that were shown to leave the numbers as they are."""
START, END = "<!-- proof: {} -->\n", "<!-- end of proof -->"
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


def measured(claim: Claim, lines: Sequence[Line], variant: str, budget: Budget) -> list[Line]:
    """Return the runs of a variant with its best learning rate, by seed; of a reference, those of its own budget."""
    name = budget.like[1] if budget.like is not None and budget.like[0] == variant else budget.name
    rate = best_rate(claim, variant, name, lines)
    rows = [line for line in lines if (line["variant"], line["budget"], line["learning_rate"]) == (variant, name, rate)]
    return sorted(rows, key=lambda line: line["seed"])


def table(claim: Claim, lines: Sequence[Line], budget: Budget) -> list[str]:
    """Return the lines of the table of a budget: metrics, differences from the opponent, costs; none without runs."""
    names = [variant.name for variant in claim.variants]
    runs = {name: rows for name in names if (rows := measured(claim, lines, name, budget))}
    if not runs:
        return []
    first = claim.shown[0]
    titles = ["", *claim.shown, f"{first}, less {claim.opponent}", "TFLOPs", "once, TFLOPs"]
    titles += ["CPU s", "learning rate", "seeds"]
    rows = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    opponents = {line["seed"]: line["metrics"][first] for line in runs.get(claim.opponent, [])}
    for name, found in runs.items():
        cells = [name, *(spread([line["metrics"].get(metric) for line in found]) for metric in claim.shown)]
        pairs = [(line["metrics"][first], opponents[line["seed"]]) for line in found if line["seed"] in opponents]
        cells.append("" if name == claim.opponent else difference([value - other for value, other in pairs]))
        cells.append(f"{statistics.mean(line['flops'] for line in found) / 1e12:,.1f}")
        cells.append(f"{sum(found[0]['once'].values()) / 1e12:,.1f}")
        cells.append(f"{statistics.median(line['cpu_seconds'] for line in found):,.0f}")
        cells.append(f"{found[0]['learning_rate']:g}")
        cells.append(", ".join(str(line["seed"]) for line in found))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def spread(values: Sequence[float | None]) -> str:
    """Format mean and standard deviation; empty for a metric that the runs do not have."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    deviation = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.2f}{deviation}"


def difference(values: Sequence[float]) -> str:
    """Format the mean of paired differences with its 95% interval."""
    if not values:
        return ""
    half = interval(values)
    mean = statistics.mean(values)
    return f"{mean:+.2f}" if math.isinf(half) else f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def section(claim: Claim, lines: Sequence[Line]) -> str:
    """Return the tables of a claim in Markdown, with teachers, commits and machines."""
    paragraphs = [claim.statement]
    for budget in claim.budgets:
        if rows := table(claim, lines, budget):
            paragraphs += [f"**{budget.name}**", "\n".join(rows)]
    if teachers := preparations(lines):
        paragraphs.append(teachers)
    if not lines:
        return f"{claim.statement}\n\nNot measured yet.\n"
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(line["commit"] for line in lines))
    machines = ", ".join(dict.fromkeys(line["machine"]["processor"] for line in lines))
    paragraphs.append(
        f"Measured on commit {commits} ({machines}). Mean and standard deviation over the seeds; in brackets the 95% "
        "t-interval of the mean of paired differences. FLOPs are counted, forward and backward, with all teachers; "
        "those spent once, before the runs, stand apart. The learning rate is the best of "
        f"{', '.join(f'{rate:g}' for rate in claim.learning_rates)} on the validation split, of seed {claim.seeds[0]}."
    )
    return "\n\n".join(paragraphs) + "\n"


def preparations(lines: Sequence[Line]) -> str:
    """Return the table of what was trained before the runs; empty if nothing was."""
    rows = []
    for line in lines:
        if not line["budget"]:
            metrics = ", ".join(f"{name} {value:.2f}" for name, value in line["metrics"].items())
            rows.append(f"| {line['variant']} | {metrics} | {line['flops'] / 1e12:,.1f} |")
    return "\n".join(["| before the runs | metrics | TFLOPs |", "|---|---|---|", *rows]) if rows else ""


def draw(claim: Claim, lines: Sequence[Line], target: Path) -> None:
    """Draw the metric of the validation split over the FLOPs, a panel for each budget."""
    import matplotlib.pyplot as plt

    budgets = [budget for budget in claim.budgets if table(claim, lines, budget)]
    if not budgets:
        return
    figure, axes = plt.subplots(1, len(budgets), figsize=(5 * len(budgets), 4), squeeze=False, layout="constrained")
    for axis, budget in zip(axes[0], budgets, strict=True):
        for variant in claim.variants:
            if found := measured(claim, lines, variant.name, budget):
                curves = [line["curve"] for line in found]
                flops = [point["flops"] / 1e12 for point in curves[0]]
                means = [statistics.mean(p["metrics"][claim.metric] for p in at) for at in zip(*curves, strict=False)]
                axis.plot(flops[: len(means)], means, marker=".", label=variant.name)
        axis.set(title=budget.name, xlabel="TFLOPs", ylabel=claim.metric)
        axis.legend(frameon=False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def page(text: str, sections: dict[str, str]) -> str:
    """Return the text of a page with the tables of claims between their marks."""
    for name, content in sections.items():
        start = START.format(name)
        if start in text:
            before, _, rest = text.partition(start)
            text = f"{before}{start}{content}{END}{rest.partition(END)[2]}"
    return text


def out_of_date(lines: Sequence[Line], accepted: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return what has changed since the runs were measured, each change once, with the runs' variant.

    Args:
        lines: lines of results.
        accepted: changes of files that leave the numbers as they are; see `proof.hashes.changes`.
    """
    found: dict[str, None] = {}
    checked = set()
    for line in lines:
        for measured_with in (line, *line.get("probes", {}).values()):
            same = json.dumps([measured_with.get(name) for name in ("config", "step", "words")])
            if "config" not in measured_with or same in checked:
                continue
            checked.add(same)
            words = filled([*measured_with["words"], *measured_with.get("callbacks", ())], {})
            changed = changes(measured_with, words, accepted)
            found |= dict.fromkeys(f"{line['claim']}, {line['variant']}: {text}" for text in changed)
    return list(found)


def accepted_changes() -> list[dict[str, str]]:
    """Return the changes of files that were shown to leave the numbers as they are."""
    found: list[dict[str, str]] = json.loads(ACCEPTED.read_text(encoding="utf-8")) if ACCEPTED.is_file() else []
    return found


def main() -> int:
    """Write pages and figures, and print what is out of date; return 1 if something is."""
    sections: dict[str, str] = {}
    changed: list[str] = []
    for file in sorted(RESULTS.glob("*.jsonl")):
        claim = load_claim(file.stem)
        lines = read_lines(file)
        sections[claim.name] = section(claim, lines)
        draw(claim, lines, IMAGES / f"proof_{claim.name}.png")
        changed += out_of_date(lines, accepted_changes())
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (written := page(text, sections)) != text:
            path.write_text(written, encoding="utf-8")
            print(path)
    for text in changed:
        print(f"out of date: {text}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
