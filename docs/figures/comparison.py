"""Write the tables of `docs/results.md` and draw its figures: `python docs/figures/comparison.py`.

The results are `docs/figures/comparison.jsonl`, one line a run of `benchmarks/compare.py`.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent
RESULTS, PAGE, IMAGES = DOCS / "figures/comparison.jsonl", DOCS / "results.md", DOCS / "images"
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
    """Draw recall at 1 and zero-shot accuracy on white, readable on light and dark pages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 4.0), layout="constrained", facecolor="white")
    kinds = {"equal samples": ("#4472a8", -0.19), "equal time": ("#e08a2e", 0.19)}
    titles = {"r1": "R@1, mean of both directions, %", "zero-shot": "zero-shot, %"}
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        names = [name for name in ROWS if column == "r1" or "re-ranked" not in name]
        for kind, (color, shift) in kinds.items():
            for place, name in enumerate(names):
                method, prefix = ROWS[name]
                values = [retrieval(run, prefix)[column] for run in runs(found, kind, method)]
                if values:
                    bar(axis, place + shift, values, color, 0.36, kind if place == 0 else None)
        finish(axis, names, title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def prices(run: Run, prefix: str) -> dict[str, float]:
    """Return what a model costs: thousand parameters of its towers, ms an image and a text, seconds of training."""
    reranking = prefix == "rerank_"
    parameters = run["parameters"] - run["word_parameters"] + reranking * run["rerank_parameters"]
    latency = run["latency_ms"]["image"] + run["latency_ms"]["text"] + reranking * run["latency_ms"].get("rerank", 0.0)
    return {
        "parameters": parameters / 1e3,
        "latency": latency,
        "training": 64 * run["steps"] / run["pairs_per_second"],
    }


def draw_cost(found: list[Run], target: Path) -> None:
    """Draw mean recall against parameters, latency, and time of training without and with what comes before."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {
        "parameters": "thousand parameters, without the words'",
        "latency": "ms for an image and a text",
        "training": "s of training (hollow: and what comes before)",
    }
    figure, axes = plt.subplots(2, 2, figsize=(8, 6.4), layout="constrained", facecolor="white", sharey=True)
    sizes = (13, 8, 8, 8, 8, 8)  # plain CLIP's is larger, for MobileCLIP's lies on it
    looks = zip(plt.get_cmap("tab10").colors, "os^Dvv", sizes, strict=False)
    for (name, (method, prefix)), (color, marker, size) in zip(ROWS.items(), looks, strict=True):
        trained = runs(found, "equal samples", method)
        recalls = [retrieval(run, prefix)["mean"] for run in trained]
        mean, deviation = statistics.mean(recalls), statistics.stdev(recalls) if len(recalls) > 1 else 0.0
        before = sum(runs(found, "before", part)[0]["wall"] for part in BEFORE.get(method, ()))
        look = {"color": color, "marker": marker, "markersize": size}
        for axis, column in zip(axes.flat, titles, strict=False):
            price = statistics.median(prices(run, prefix)[column] for run in trained)
            axis.errorbar(price, mean, yerr=deviation, capsize=2, linestyle="", label=name, **look)
            if column == "training" and before:
                axis.plot([price, price + before], [mean, mean], color=color, linewidth=0.8)
                axis.plot(price + before, mean, fillstyle="none", **look)
    for axis, title in zip(axes.flat, titles.values(), strict=False):
        axis.set(xlabel=title, ylim=(0, 100))
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean recall, %")
    axes[1, 1].axis("off")
    axes[1, 1].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False, fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def bar(axis: Any, place: float, values: list[float], color: str, height: float, label: str | None = None) -> None:
    """Draw a mean with its standard deviation and its number."""
    mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    axis.barh(place, mean, xerr=deviation, color=color, ecolor="#222222", height=height, capsize=2, label=label)
    axis.text(mean + deviation, place, f" {mean:.1f}", va="center", fontsize=9)


def finish(axis: Any, names: list[str], what: str) -> None:
    """Name the rows, from top to bottom, and the axis."""
    axis.set_yticks(range(len(names)), names, fontsize=10)
    axis.invert_yaxis()
    axis.set_xlabel(what, fontsize=10)
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Write the tables and draw the figures."""
    found = read()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    draw(found, IMAGES / "comparison.png")
    draw_cost(found, IMAGES / "comparison_cost.png")


if __name__ == "__main__":
    main()
