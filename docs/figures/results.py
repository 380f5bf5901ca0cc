"""Draw `docs/images/results.png` from the measured results on the pages: `python docs/figures/results.py`.

Each panel is one table of means and standard deviations over three seeds; the numbers are read from the page. Rows
without a deviation are later checks, one number each, measured outside of this repository's scripts.
"""

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

DOCS = Path(__file__).resolve().parent.parent
MEASURED, CHECKED = "#4472a8", "#e08a2e"


class Panel(NamedTuple):
    """A panel of the figure.

    Attributes:
        page: file in docs/ with the table.
        header: start of the line of the table's titles.
        column: number of the shown column, after the names.
        names: shown rows by their names in the table, from top to bottom, with the words of the figure.
        title: title.
        what: what is measured.
    """

    page: str
    header: str
    column: int
    names: dict[str, str]
    title: str
    what: str


class Row(NamedTuple):
    """A row of a table: name, mean in percent, and its standard deviation, which a later check does not have."""

    name: str
    mean: float
    deviation: float | None


PANELS = (
    Panel(
        "methods/cocord.md",
        "| | last epoch | best epoch |",
        1,
        {
            "labels alone": "labels alone, 20 epochs",
            "KD": "KD, 20 epochs",
            "CoCoRD": "CoCoRD, 20 epochs",
            "CoCoRD + KD": "CoCoRD + KD, 20 epochs",
            "labels alone, 76 epochs": "labels alone, equal compute",
        },
        "CoCoRD: resnet20 distilled into resnet8",
        "top-1 on CIFAR-10 (%)",
    ),
    Panel(
        "methods/shre.md",
        "| | text-to-image R@1 |",
        2,
        {
            "without the teacher": "no teacher",
            "without the teacher, `mask_same_text`": "no teacher, mask_same_text",
            "SHRe": "teacher",
            "without the teacher, `shared: transformer`": "no teacher, shared: transformer",
            "`shared: transformer`": "teacher, shared: transformer",
        },
        "SHRe: with and without its teacher",
        "mean recall, 957 images (%)",
    ),
)


def rows(panel: Panel) -> list[Row]:
    """Read the rows of a panel's table, in the order of the panel."""
    lines = (DOCS / panel.page).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(panel.header))
    read = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if numbers := re.fullmatch(r"([\d.]+)(?: ± ([\d.]+))?", cells[panel.column - 1]):
            read[name] = Row(name, float(numbers[1]), float(numbers[2]) if numbers[2] else None)
    return [read[name] for name in panel.names]


def draw(target: Path) -> None:
    """Draw all panels on white, which is readable on light and dark pages."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", facecolor="white")
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        shown = rows(panel)
        for place, row in enumerate(shown):
            color = MEASURED if row.deviation is not None else CHECKED
            axis.barh(place, row.mean, xerr=row.deviation, color=color, ecolor="#222222", height=0.62, capsize=3)
            end = row.mean + (row.deviation or 0.0)
            axis.text(end + 0.02 * shown[-1].mean, place, f"{row.mean:.1f}", va="center", fontsize=10)
        axis.set_yticks(range(len(shown)), list(panel.names.values()), fontsize=10)
        axis.invert_yaxis()
        axis.set_title(panel.title, fontsize=11, loc="right")
        axis.set_xlabel(panel.what, fontsize=10, loc="right")
        axis.set_xlim(0, 1.2 * max(row.mean + (row.deviation or 0.0) for row in shown))
        axis.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=MEASURED, label="three seeds"), Patch(color=CHECKED, label="a later check")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.savefig(target, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(DOCS / "images" / "results.png")
