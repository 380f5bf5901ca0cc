"""Draw `docs/images/results.png` from the measured results on the pages: `python docs/figures/results.py`.

Each panel is one table of means and standard deviations over three seeds; the numbers are read from the page.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent
PANELS = (
    (
        "methods/cocord.md",
        "| | last epoch | best epoch |",
        1,
        "CoCoRD: resnet20 distilled into resnet8",
        "top-1 on CIFAR-10 (%)",
    ),
    (
        "methods/mmlg.md",
        "| start of the descendant |",
        4,
        "MM-LG: start of a CLIP of 6 layers",
        "mean recall, 957 images (%)",
    ),
    (
        "methods/mobileclip.md",
        "| | text-to-image R@5 |",
        3,
        "MobileCLIP: what reinforces",
        "zero-shot top-1, 66 labels (%)",
    ),
    ("methods/shre.md", "| | text-to-image R@1 |", 2, "SHRe: what is distilled", "mean recall, 957 images (%)"),
)
ROWS = {"methods/shre.md": ("without the teacher", "contrast of h2 alone", "SHRe", "`shared: transformer`")}


def rows(page: str, header: str, column: int) -> list[tuple[str, float, float]]:
    """Read name, mean and deviation of each row of a table."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(header))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if numbers := re.match(r"([\d.]+) ± ([\d.]+)$", cells[column]):
            found.append((cells[0], float(numbers[1]), float(numbers[2])))
    wanted = ROWS.get(page, [name for name, *_ in found])
    return sorted((row for row in found if row[0] in wanted), key=lambda row: wanted.index(row[0]))


def draw(target: Path) -> None:
    """Draw all panels on white, which is readable on light and dark pages."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.0), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(wspace=0.06, hspace=0.06)  # type: ignore[union-attr]
    for axis, (page, header, column, title, what) in zip(axes.flat, PANELS, strict=True):
        found = rows(page, header, column)
        names = [name.replace("`", "") for name, *_ in found]
        means, deviations = [row[1] for row in found], [row[2] for row in found]
        axis.barh(names, means, xerr=deviations, color="#4472a8", ecolor="#222222", height=0.62, capsize=3)
        for place, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
            axis.text(mean + deviation + 0.03 * max(means), place, f"{mean:.1f}", va="center", fontsize=10)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=11, loc="right")
        axis.set_xlabel(what, fontsize=10, loc="right")
        axis.set_xlim(0, 1.22 * max(mean + deviation for mean, deviation in zip(means, deviations, strict=True)))
        axis.tick_params(labelsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(DOCS / "images" / "results.png")
