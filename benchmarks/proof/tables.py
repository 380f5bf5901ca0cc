r"""Write the tables and the figures of the proof runs from their files of results, and say what is out of date.

    python benchmarks/proof/tables.py

A page holds the tables of a claim between `<!-- proof: NAME -->` and `<!-- end of proof -->`. Nothing here trains: the
files in `docs/results/` are all that is read.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from proof.claim import Budget, Claim, filled, load_claim
from proof.hashes import changes, flat
from proof.plan import best_rate
from proof.results import RESULTS, Line, read_lines
from vlightning.commands.compare.report import difference, interval, spread

DOCS = RESULTS.parent
IMAGES = DOCS / "images"
ACCEPTED = RESULTS / "accepted_changes.json"
"""Changes of files and settings of a step that were shown to leave the numbers as they are."""
START, END = "<!-- proof: {} -->\n", "<!-- end of proof -->"


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
    titles = ["", *claim.shown, f"{first}, less {claim.opponent}"]
    titles += [f"times fewer steps to {claim.level_of}'s {claim.metric}"] if claim.level_of else []
    titles += ["TFLOPs", "once, TFLOPs", "CPU s", "learning rate", "seeds"]
    rows = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    opponents = {line["seed"]: line["metrics"][first] for line in runs.get(claim.opponent, [])}
    for name, found in runs.items():
        cells = [name, *(spread([line["metrics"].get(metric) for line in found]) for metric in claim.shown)]
        pairs = [(line["metrics"][first], opponents[line["seed"]]) for line in found if line["seed"] in opponents]
        cells.append("" if name == claim.opponent else difference([value - other for value, other in pairs]))
        if claim.level_of:
            cells.append("" if name == claim.level_of else factor(claim.metric, found, runs.get(claim.level_of, [])))
        cells.append(f"{statistics.mean(line['flops'] for line in found) / 1e12:,.1f}")
        cells.append(f"{sum(found[0]['once'].values()) / 1e12:,.1f}")
        seconds = [line["cpu_seconds"] for line in found if "cpu_seconds" in line]  # not measured in the first runs
        cells.append(f"{statistics.median(seconds):,.0f}" if seconds else "")
        cells.append(f"{found[0]['learning_rate']:g}")
        cells.append(", ".join(str(line["seed"]) for line in found))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def steps_to(metric: str, level: float, line: Line) -> float | None:
    """Return after how many steps the curve of a run first reaches a level, between two validations by interpolation.

    Returns:
        None if it never does.
    """
    step = 0.0
    value = 0.0
    for point in line["curve"]:
        reached = point["metrics"][metric]
        if reached >= level:
            share = (level - value) / (reached - value) if reached > value else 1.0
            return step + share * (point["step"] - step)
        step = point["step"]
        value = reached
    return None


def factor(metric: str, lines: Sequence[Line], others: Sequence[Line]) -> str:
    """Format how many times fewer steps runs take to the last value of others, seed by seed.

    The mean is geometric, and so is its 95% interval; a run that does not reach the level is counted apart.
    """
    last = {line["seed"]: line["curve"][-1] for line in others}
    pairs = [(line, last[line["seed"]]) for line in lines if line["seed"] in last]
    needed = [(steps_to(metric, end["metrics"][metric], line), end["step"]) for line, end in pairs]
    ratios = [math.log(end / steps) for steps, end in needed if steps]
    never = f"; {len(needed) - len(ratios)} of {len(needed)} never" if len(ratios) < len(needed) else ""
    if not ratios:
        return f"never, {len(needed)} seeds" if needed else ""
    mean = statistics.mean(ratios)
    half = interval(ratios)
    text = f"{math.exp(mean):.2f}"
    if not math.isinf(half):
        text += f" ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
    return text + never


def sums(claim: Claim, lines: Sequence[Line]) -> str:
    """Return the table of FLOPs that several variants take together; empty while one of them has no run.

    What several variants need is counted once. Preparations and runs are those of the first seed.
    """
    if not claim.sums:
        return ""
    seed = claim.seeds[0]
    spent = {line["variant"]: line["flops"] for line in lines if not line["budget"] and line["seed"] in (0, seed)}
    rows = []
    for name, variants in claim.sums.items():
        runs = [measured(claim, lines, variant, claim.budgets[0]) for variant in variants]
        needed = claim.needed([need for variant in variants for need in claim.variant(variant).needs])
        if all(runs) and all(preparation.name in spent for preparation in needed):
            once = sum(spent[preparation.name] for preparation in needed)
            total = once + sum(found[0]["flops"] for found in runs)
            rows.append(f"| {name} | {', '.join(variants)} | {once / 1e12:,.1f} | {total / 1e12:,.1f} |")
    return (
        "\n".join(["| together | runs | before them, TFLOPs | in all, TFLOPs |", "|---|---|---|---|", *rows])
        if rows
        else ""
    )


def section(claim: Claim, lines: Sequence[Line]) -> str:
    """Return the tables of a claim in Markdown, with teachers, commits and machines."""
    paragraphs = [claim.statement]
    for budget in claim.budgets:
        if rows := table(claim, lines, budget):
            paragraphs += [f"**{budget.name}**", "\n".join(rows)]
    paragraphs += [text for text in (sums(claim, lines), preparations(claim, lines)) if text]
    if not lines:
        return f"{claim.statement}\n\nNot measured yet.\n"
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(line["commit"] for line in lines))
    machines = ", ".join(dict.fromkeys(line["machine"].get("gpu") or line["machine"]["processor"] for line in lines))
    paragraphs.append(
        f"Measured on commit {commits} ({machines}). Mean and standard deviation over the seeds; in brackets the 95% "
        "t-interval of the mean of paired differences. FLOPs are counted, forward and backward, with all teachers; "
        "those spent once, before the runs, stand apart. The learning rate is the best of "
        f"{', '.join(f'{rate:g}' for rate in claim.learning_rates)} on the validation split, of seed {claim.seeds[0]}."
    )
    return "\n\n".join(paragraphs) + "\n"


def preparations(claim: Claim, lines: Sequence[Line]) -> str:
    """Return the table of what was done before the runs, with those metrics that the claim names, else with all."""
    by_name: dict[str, list[Line]] = {}
    for line in lines:
        if not line["budget"]:
            by_name.setdefault(line["variant"], []).append(line)
    rows = []
    for name, found in by_name.items():
        names = list(found[0]["metrics"])
        last = claim.metric.rpartition("/")[2]  # of a metric whose name has a protocol, too
        wanted = [metric for metric in names if metric in (claim.metric, *claim.shown)]
        wanted = wanted or [metric for metric in names if metric.rpartition("/")[2] == last] or names
        metrics = ", ".join(f"{metric} {spread([line['metrics'].get(metric) for line in found])}" for metric in wanted)
        rows.append(f"| {name} | {metrics} | {statistics.mean(line['flops'] for line in found) / 1e12:,.1f} |")
    return "\n".join(["| before the runs | metrics | TFLOPs |", "|---|---|---|", *rows]) if rows else ""


def draw(claim: Claim, lines: Sequence[Line], target: Path) -> None:
    """Draw the metric of the validation split over the FLOPs, a panel for each budget, with deviations of the seeds.

    Of a claim with sums, draw instead the first shown metric of the runs of each sum.
    """
    import matplotlib.pyplot as plt

    if claim.sums:
        draw_sums(claim, lines, target)
        return
    budgets = [budget for budget in claim.budgets if table(claim, lines, budget)]
    if not budgets:
        return
    figure, axes = plt.subplots(1, len(budgets), figsize=(6 * len(budgets), 5), squeeze=False, layout="constrained")
    legend = {}
    for axis, budget in zip(axes[0], budgets, strict=True):
        for number, variant in enumerate(claim.variants):
            if runs := measured(claim, lines, variant.name, budget):
                curves = [line["curve"] for line in runs]
                points = list(zip(*curves, strict=False))
                flops = [point[0]["flops"] / 1e12 for point in points]
                values = [[at["metrics"][claim.metric] for at in point] for point in points]
                bars = [statistics.stdev(row) if len(row) > 1 else 0.0 for row in values]
                means = [statistics.mean(row) for row in values]
                legend[variant.name] = axis.errorbar(flops, means, bars, marker=".", capsize=2, color=f"C{number}")
        axis.set(title=budget.name, xlabel="TFLOPs", ylabel=claim.metric)
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_sums(claim: Claim, lines: Sequence[Line], target: Path) -> None:
    """Draw the first shown metric of the runs of each sum, a line a sum, with deviations of the seeds."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, variants in claim.sums.items():
        runs = [measured(claim, lines, variant, claim.budgets[0]) for variant in variants]
        if not all(runs):
            continue
        values = [[line["metrics"][claim.shown[0]] for line in found] for found in runs]
        bars = [statistics.stdev(row) if len(row) > 1 else 0.0 for row in values]
        labels = [variant.removeprefix(f"{name}, ") for variant in variants]
        axis.errorbar(labels, [statistics.mean(row) for row in values], bars, marker=".", capsize=2, label=name)
    axis.set(ylabel=claim.shown[0], title=claim.budgets[0].name)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_all(results: Sequence[tuple[Claim, Sequence[Line]]], target: Path) -> None:
    """Draw the first shown metric of each claim's variants at equal FLOPs, a panel a claim; the opponent is grey."""
    import matplotlib.pyplot as plt

    panels = [panel for claim, lines in results if (panel := at_equal_flops(claim, lines))]
    heights = [len(panel.values) for panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(8, 0.8 * len(panels) + 0.32 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
        facecolor="white",
    )
    for axis, panel in zip(axes.flat, panels, strict=True):
        for row, (name, values) in enumerate(panel.values.items()):
            deviation = statistics.stdev(values)
            mean = statistics.mean(values)
            color = "#999999" if name == panel.claim.opponent else "#4472a8"
            axis.barh(row, mean, xerr=deviation, color=color, ecolor="#222222", height=0.65, capsize=3)
            axis.annotate(
                f"{mean:.1f}", (mean + deviation, row), (5, 0), textcoords="offset points", va="center", fontsize=9
            )
        axis.set_yticks(range(len(panel.values)), list(panel.values), fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.set_title(f"{panel.claim.name}: {panel.claim.shown[0]}, {panel.budget}", fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


class Panel(NamedTuple):
    """A panel of the figure of all claims.

    Attributes:
        claim: the claim.
        budget: name of the budget.
        values: the metric of each variant's runs.
    """

    claim: Claim
    budget: str
    values: dict[str, list[float]]


def at_equal_flops(claim: Claim, lines: Sequence[Line]) -> Panel | None:
    """Return the metric of the variants with three seeds; None for a claim without such a budget or opponent."""
    for budget in claim.budgets:
        if budget.like is None and budget.flops is None:
            continue
        runs = {variant.name: measured(claim, lines, variant.name, budget) for variant in claim.variants}
        values = {
            name: [line["metrics"][claim.shown[0]] for line in found] for name, found in runs.items() if len(found) > 2
        }
        if claim.opponent in values and len(values) > 1:
            return Panel(claim, budget.name, values)
    return None


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
            if "config" not in measured_with or (same := _without_rate_and_seed(measured_with)) in checked:
                continue
            checked.add(same)
            words = filled([*measured_with["words"], *measured_with.get("callbacks", ())], {})
            changed = changes(measured_with, words, accepted)
            found |= dict.fromkeys(f"{line['claim']}, {line['variant']}: {text}" for text in changed)
    return list(found)


def _without_rate_and_seed(line: Mapping[str, Any]) -> str:
    """Return what two runs of a variant share, whose words name both values: to parse each line takes minutes."""
    words = [word for word in line["words"] if not re.match(r"--(.*\.learning_rate|seed_everything)=", word)]
    config = {name: value for name, value in flat(line["config"]).items() if not name.endswith(".learning_rate")}
    return json.dumps([config, line["step"], words, line.get("callbacks")])


def accepted_changes() -> list[dict[str, Any]]:
    """Return the changes of files that were shown to leave the numbers as they are."""
    found: list[dict[str, Any]] = json.loads(ACCEPTED.read_text(encoding="utf-8")) if ACCEPTED.is_file() else []
    return found


def main() -> int:
    """Write pages and figures, and print what is out of date; return 1 if something is."""
    sections: dict[str, str] = {}
    results: list[tuple[Claim, Sequence[Line]]] = []
    changed: list[str] = []
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    for file in sorted(RESULTS.glob("*.jsonl")):
        claim = load_claim(file.stem)
        lines = read_lines(file)
        sections[claim.name] = section(claim, lines)
        results.append((claim, lines))
        figure = IMAGES / f"proof_{claim.name}.png"
        if any(figure.name in text for text in pages.values()):
            draw(claim, lines, figure)
        changed += out_of_date(lines, accepted_changes())
    draw_all(results, IMAGES / "proof.png")
    for path, text in pages.items():
        if (written := page(text, sections)) != text:
            path.write_text(written, encoding="utf-8")
            print(path)
    for text in changed:
        print(f"out of date: {text}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
