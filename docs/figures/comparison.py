"""Write the tables of `docs/results.md` and draw `docs/images/comparison.png`: `python docs/figures/comparison.py`.

The results are `docs/figures/comparison.jsonl`, one line a run of `benchmarks/compare.py`.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent
RESULTS, PAGE, IMAGE = DOCS / "figures/comparison.jsonl", DOCS / "results.md", DOCS / "images/comparison.png"
Run = dict[str, Any]
ROWS = {
    "plain CLIP": ("CLIP", ""),
    "MobileCLIP, reinforced": ("MobileCLIP", ""),
    "MM-LG, descendant": ("MM-LG", "karpathy5/"),
    "SHRe": ("SHRe", "h2/"),
    "ALBEF, contrast": ("ALBEF", ""),
    "ALBEF, re-ranked": ("ALBEF", "rerank_"),
}
"""Method and prefix of the metrics of each row."""
STUDENTS = ("labels", "KD", "CRD", "CoCoRD")
BEFORE = {
    "MobileCLIP": ("larger CLIP", "reinforcement"),
    "MM-LG": ("larger CLIP", "learngene"),
    "SHRe": ("classifier",),
}
"""What a method needs before it trains."""


def read() -> list[Run]:
    """Return all runs."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def runs(found: list[Run], kind: str, method: str) -> list[Run]:
    """Return the runs of a method, by seed."""
    return sorted((run for run in found if (run["kind"], run["method"]) == (kind, method)), key=lambda run: run["seed"])


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def retrieval(run: Run, prefix: str) -> dict[str, float]:
    """Return recalls of a run: "i2t" and "t2i" at 1, their mean "r1", the "mean" of all six, and "zero-shot"."""
    metrics = run["metrics"]
    both = [metrics[f"test/{prefix}{direction}_r1"] for direction in ("image_to_text", "text_to_image")]
    mean = metrics[f"test/{prefix}recall_mean"]
    both_and_mean = {"i2t": both[0], "t2i": both[1], "r1": statistics.mean(both), "mean": mean}
    return both_and_mean | {"zero-shot": metrics["test/zero_shot_top1"]}


def quality(found: list[Run]) -> list[str]:
    """Return the lines of the table of recall and accuracy."""
    titles = (
        "| | image to text R@1 | text to image R@1 | mean recall | zero-shot | mean recall, equal time | pairs seen |"
    )
    lines = [titles, "|---|---|---|---|---|---|---|"]
    for name, (method, prefix) in ROWS.items():
        equal = [retrieval(run, prefix) for run in runs(found, "equal samples", method)]
        timed = runs(found, "equal time", method)
        cells = [spread([one[column] for one in equal]) for column in ("i2t", "t2i", "mean", "zero-shot")]
        if prefix == "rerank_":
            cells[3] = ""  # images are classified by contrast
        cells.append(spread([retrieval(run, prefix)["mean"] for run in timed]))
        cells.append(f"{64 * timed[0]['steps']:,}" if timed else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def cost(found: list[Run]) -> list[str]:
    """Return the lines of the table of sizes, speed, memory and what a method needs before."""
    titles = ["", "thousand parameters", "and of words", "ms an image", "ms a text", "pairs/s in training", "peak MiB"]
    lines = [f"| {' | '.join([*titles, 'seconds before'])} |", "|---|---|---|---|---|---|---|---|"]
    for name, (method, prefix) in ROWS.items():
        measured = runs(found, "equal samples", method)
        if not measured:
            continue

        def middle(value: Callable[[Run], float], measured: list[Run] = measured) -> float:
            return statistics.median(value(run) for run in measured)

        first = measured[0]
        towers = first["parameters"] - first["word_parameters"]
        image, text = (middle(lambda run, side=side: run["latency_ms"][side]) for side in ("image", "text"))
        cells = [f"{towers / 1e3:.0f}", f"{first['word_parameters'] / 1e3:.0f}", f"{image:.2f}", f"{text:.2f}"]
        if prefix == "rerank_":
            cells[0] = f"{(towers + first['rerank_parameters']) / 1e3:.0f}"
            cells[2] += f", and {middle(lambda run: run['latency_ms']['rerank']):.1f} for 32 candidates"
        cells += [f"{middle(lambda run: run['pairs_per_second']):.0f}", f"{middle(lambda run: run['peak_mib']):.0f}"]
        before = [runs(found, "before", part)[0]["wall"] for part in BEFORE.get(method, ())]
        lines.append(f"| {name} | {' | '.join([*cells, f'{sum(before):.0f}'])} |")
    return lines


def classifiers(found: list[Run]) -> list[str]:
    """Return the lines of the table of CoCoRD's task."""
    (teacher,) = runs(found, "before", "CoCoRD's teacher")
    lines = ["| resnet8 learns from | top-1 | images/s |", "|---|---|---|"]
    for row in STUDENTS:
        trained = runs(found, "students", row)
        top1 = spread([run["metrics"]["val/top1"] for run in trained])
        lines.append(f"| {row} | {top1} | {trained[0]['pairs_per_second']:.0f} |")
    return [*lines, f"| (the teacher, resnet20, from labels) | {teacher['metrics']['val/top1']:.1f} | |"]


TABLES = {"quality": quality, "cost": cost, "classifiers": classifiers}


def page(text: str, found: list[Run]) -> str:
    """Return the page with its tables between their markers."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = before + start + "\n".join(table(found)) + "\n" + end + rest.partition(end)[2]
    return text


def draw(found: list[Run], target: Path) -> None:
    """Draw recall at 1, zero-shot accuracy and CoCoRD's task on white, readable on light and dark pages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 3, figsize=(11.5, 3.6), layout="constrained", facecolor="white", width_ratios=[3, 3, 2]
    )
    kinds = {"equal samples": ("#4472a8", -0.19), "equal time": ("#e08a2e", 0.19)}
    for axis, column, title in zip(
        axes, ("r1", "zero-shot"), ("R@1, mean of both directions", "zero-shot"), strict=False
    ):
        names = [name for name in ROWS if column == "r1" or "re-ranked" not in name]
        for kind, (color, shift) in kinds.items():
            for place, name in enumerate(names):
                method, prefix = ROWS[name]
                values = [retrieval(run, prefix)[column] for run in runs(found, kind, method)]
                if values:
                    bar(axis, place + shift, values, color, 0.36, kind if place == 0 else None)
        finish(axis, names, f"{title}, %")
    axes[0].legend(fontsize=8, loc="lower right")
    for place, row in enumerate(STUDENTS):
        bar(axes[2], place, [run["metrics"]["val/top1"] for run in runs(found, "students", row)], "#4472a8", 0.6)
    finish(axes[2], list(STUDENTS), "resnet8, top-1 of 40 classes, %")
    figure.savefig(target, dpi=110)


def bar(axis: Any, place: float, values: list[float], color: str, height: float, label: str | None = None) -> None:
    """Draw a mean with its standard deviation and its number."""
    mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    axis.barh(place, mean, xerr=deviation, color=color, ecolor="#222222", height=height, capsize=2, label=label)
    axis.text(mean + deviation, place, f" {mean:.1f}", va="center", fontsize=8)


def finish(axis: Any, names: list[str], what: str) -> None:
    """Name the rows, from top to bottom, and the axis."""
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(what, fontsize=9)
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Write the tables and draw the figure."""
    found = read()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    draw(found, IMAGE)


if __name__ == "__main__":
    main()
