"""Tables and charts of results."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ...common.files import replacing
from .results import Aggregate, Result, aggregates
from .tasks import TASKS

REFERENCE = Path(__file__).with_name("reference.json")


def write_report(results: Sequence[Result], out: Path) -> list[Path]:
    """Write the tables and the chart of results beside their file, and return the files."""
    files = [out.with_suffix(suffix) for suffix in (".md", ".csv", ".png")]
    for file, write in zip(files, (_write_markdown, _write_csv, _write_chart), strict=True):
        with replacing(file) as staged:
            write(results, staged)
    return files


def markdown(results: Sequence[Result]) -> str:
    """Return a table of the sets and one of the aggregates, in percent."""
    models = dict.fromkeys(f"{result.model} (weights {result.sha256[:12]})" for result in results)
    notes = _notes(results)
    lines = [f"Model: {', '.join(models)}.{''.join(f' {note}.' for note in notes)}", ""]
    lines.append(_row("set", "protocol", "metric", "value", "samples", "remarks"))
    lines.append(_row("---", "---", "---", "---:", "---:", "---"))
    for result in results:
        if result.main is not None:
            task = TASKS[result.key]
            remarks = [f"left out, {cause}: {count}" for cause, count in result.bad.items()]
            remarks += [result.note] if result.note else []
            samples = f"{result.samples:,}" if result.samples else ""
            value = f"{100 * result.main:.2f}"
            lines.append(_row(task.name, result.protocol, task.main, value, samples, "; ".join(remarks)))
    lines += ["", *_aggregate_lines(aggregates(results), notes)]
    missing = [f"{result.key} ({result.missing})" for result in results if result.main is None and not result.absent]
    if missing:
        lines += ["", f"Missing: {'; '.join(missing)}."]
    if absent := list(dict.fromkeys(result.key for result in results if result.absent)):
        lines += ["", f"Not in the folder of the sets: {len(absent)} ({', '.join(absent)})."]
    return "\n".join(lines) + "\n"


def _notes(results: Sequence[Result]) -> list[str]:
    """Return the different notes of zero-shot results."""
    return list(dict.fromkeys(r.note for r in results if r.note and r.protocol == "zero_shot"))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _aggregate_lines(aggregated: Sequence[Aggregate], notes: Sequence[str]) -> list[str]:
    """Return a table of aggregates, where a mean over part of the sets says so."""
    lines = [_row("aggregate (zero-shot)", "value", "sets"), _row("---", "---:", "---:")]
    for aggregate in aggregated:
        if aggregate.mean is None and any(other.evaluated for other in aggregated):
            continue
        value = "missing" if aggregate.mean is None else f"{100 * aggregate.mean:.2f}"
        partial = "" if aggregate.complete or aggregate.mean is None else " (of these sets only)"
        remark = f" ({'; '.join(notes)})" if notes and aggregate.mean is not None else ""
        lines.append(_row(aggregate.name, f"{value}{partial}{remark}", f"{aggregate.evaluated} of {aggregate.sets}"))
    return lines


def _write_markdown(results: Sequence[Result], file: Path) -> None:
    file.write_text(markdown(results), encoding="utf-8")


def _write_csv(results: Sequence[Result], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as content:
        writer = csv.writer(content)
        writer.writerow(["key", "protocol", "metric", "value", "main", "samples", "left_out", "model", "note"])
        for result in results:
            rest = [result.samples, sum(result.bad.values()), result.model, result.note or ""]
            for metric, value in result.metrics.items():
                if metric != "main_metric":
                    writer.writerow(
                        [result.key, result.protocol, metric, value, metric == TASKS[result.key].main, *rest]
                    )
            if result.main is None:
                writer.writerow([result.key, result.protocol, TASKS[result.key].main, "", True, *rest])


def _write_chart(results: Sequence[Result], file: Path) -> None:
    """Draw the aggregates beside those of published models; an incomplete aggregate is hatched."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    sets = aggregates(results)
    names = [aggregate.name for aggregate in sets]
    rows: dict[str, list[float]] = {
        model: [values[name] for name in names] for model, values in reference["models"].items()
    }
    evaluated = results[0].model if results else "no results"
    rows[evaluated] = [100 * (aggregate.mean or 0.0) for aggregate in sets]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / (len(rows) + 1)  # a gap before one's own bar, which is the last
    for number, (model, values) in enumerate(rows.items()):
        shift = (number + (model == evaluated) - len(rows) / 2) * width
        positions = [position + shift for position in range(len(names))]
        shade = "C3" if model == evaluated else str(0.85 - 0.1 * number)
        label = "\n".join([_short(model), *(_notes(results) if model == evaluated else [])])
        bars = axes.bar(positions, values, width, label=label, color=shade)
        if model == evaluated:
            for bar, aggregate in zip(bars, sets, strict=True):
                bar.set_hatch("" if aggregate.complete else "///")
                bar.set_edgecolor("white" if aggregate.mean is not None else "none")
                position = {"x": bar.get_x() + width / 2, "y": bar.get_height() + 1, "ha": "center", "fontsize": 8}
                if aggregate.mean is None:
                    axes.text(s="missing", rotation=90, va="bottom", color="C3", **position)
                else:
                    axes.text(s=f"{bar.get_height():.1f}", color="C3", weight="bold", **position)
    ticks = [
        aggregate.name if aggregate.complete else f"{aggregate.name}\n{aggregate.evaluated} of {aggregate.sets} sets"
        for aggregate in sets
    ]
    axes.set_xticks(range(len(names)), ticks)
    axes.set_ylabel("percent")
    axes.set_ylim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center", frameon=False)
    partial = "" if all(aggregate.complete for aggregate in sets) else ". Hatched: mean of part of the sets"
    axes.set_title(f"Grey: {reference['source'].partition(' (')[0]} ({reference['date']}){partial}", fontsize=8)
    figure.savefig(file, format="png", dpi=120)


def _short(name: str, longest: int = 40) -> str:
    """Return a name for a legend; a checkpoint is called by its run."""
    name = name.removesuffix("/checkpoints/last.ckpt").removeprefix("runs/")
    return name if len(name) <= longest else f"...{name[-longest:]}"


def compare(first: Sequence[Result], second: Sequence[Result], names: tuple[str, str], out: Path | None) -> str:
    """Return a table of the differences of two runs, called by `names`, and draw it if `out` names a file."""
    values: list[dict[Any, float]] = [
        {(r.key, r.protocol): 100 * r.main for r in results if r.main is not None} for results in (first, second)
    ]
    both = [key for key in values[0] if key in values[1]]
    lines = [_row("set", "protocol", *names, "difference"), _row("---", "---", "---:", "---:", "---:")]
    differences: list[tuple[str, float]] = []
    for key, protocol in both:
        before = values[0][key, protocol]
        after = values[1][key, protocol]
        lines.append(_row(TASKS[key].name, protocol, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}"))
        bar = TASKS[key].name if protocol == "zero_shot" else f"{TASKS[key].name}, {protocol}"
        differences.append((bar, after - before))
    lines += ["", _row("aggregate", *names, "difference", "sets"), _row("---", "---:", "---:", "---:", "---:")]
    shared = [[r for r in results if (r.key, r.protocol) in both] for results in (first, second)]
    for old, new in zip(aggregates(shared[0]), aggregates(shared[1]), strict=True):
        if old.mean is not None and new.mean is not None:
            before = 100 * old.mean
            after = 100 * new.mean
            count = f"{old.evaluated} of {old.sets}"
            lines.append(_row(old.name, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}", count))
    only = [f"{key} ({protocol})" for key, protocol in values[0].keys() ^ values[1].keys()]
    if only:
        lines += ["", f"In one of the two only: {', '.join(sorted(only))}."]
    if out is not None:
        with replacing(out) as staged:
            _draw_differences(differences, names, staged)
    return "\n".join(lines)


def _draw_differences(rows: list[tuple[str, float]], names: tuple[str, str], file: Path) -> None:
    rows = sorted(rows, key=lambda row: row[1])
    figure = Figure(figsize=(7, 1 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [name for name, _ in rows], [value for _, value in rows], color=["C3" if v < 0 else "C0" for _, v in rows]
    )
    axes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=8)
    axes.margins(x=0.1, y=0.01)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(f"{_short(names[1])} minus {_short(names[0])}, percentage points")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png", dpi=120)
