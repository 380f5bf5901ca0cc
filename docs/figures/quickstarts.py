"""Draw the curves of the quickstarts and the coefficients of MM-LG's: `python docs/figures/quickstarts.py [runs]`.

With a folder of runs, the curves of the quickstarts in it first replace those in `docs/figures/quickstarts.jsonl`. A
quickstart that was stopped and resumed has two folders, `version_0` and `version_1`, whose curves are put together.
"""

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent
DATA, IMAGES = DOCS / "figures/quickstarts.jsonl", DOCS / "images"
Curve = dict[str, Any]
"""Of a run and a tag: "steps", "values", and "stopped", the step at which the run was stopped, or None."""
PANELS = {
    "albef_quickstart": ("ALBEF", "val/recall_mean", "mean recall"),
    "mobileclip_quickstart": ("MobileCLIP", "val/recall_mean", "mean recall"),
    "mmlg_quickstart": ("MM-LG", "val/karpathy5/recall_mean", "mean recall"),
    "shre_quickstart": ("SHRe", "val/h2/recall_mean", "mean recall"),
    "cocord_quickstart": ("CoCoRD", "val/top1", "top-1"),
}
"""Title, tag of the accuracy, and what that is."""
LEARNGENE = "mmlg_quickstart"
BLUE, ORANGE, GREY = "#4472a8", "#d97706", "#777777"


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return steps and values of a tag in the events of one run folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def curve(run: Path, tag: str) -> Curve:
    """Return a curve of a run; steps that a resumed run repeats are those of the resumed run."""
    parts = [scalars(version, tag) for version in sorted(run.glob("version_[0-9]"))]
    points = dict(point for part in parts for point in part)
    stopped = parts[0][-1][0] if len(parts) > 1 and parts[0] and parts[1] else None
    steps = sorted(points)
    return {
        "run": run.name,
        "tag": tag,
        "stopped": stopped,
        "steps": steps,
        "values": [float(f"{points[step]:.4g}") for step in steps],
    }


def coefficients(run: Path) -> list[Curve]:
    """Return the coefficients in the newest learngene of a run, by pair of layers."""
    from safetensors.torch import load_file

    stored = load_file(sorted(run.glob("version_[0-9]/learngene.safetensors"))[-1])
    return [
        {"run": run.name, "tag": name, "values": [float(f"{value:.4g}") for value in stored[name].tolist()]}
        for name in sorted(stored)
        if name.startswith("coefficients.")
    ]


def collect(runs: Path) -> list[Curve]:
    """Read losses, accuracies and coefficients of the quickstarts in a folder of runs."""
    found = []
    for run, (_, accuracy, _) in PANELS.items():
        if (runs / run).is_dir():
            found += [curve(runs / run, tag) for tag in ("train/loss", accuracy)]
    return found + (coefficients(runs / LEARNGENE) if (runs / LEARNGENE).is_dir() else [])


def read() -> dict[tuple[str, str], Curve]:
    """Return what is stored, by run and tag."""
    lines = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return {(line["run"], line["tag"]): line for line in lines}


def draw_curves(found: dict[tuple[str, str], Curve], target: Path) -> None:
    """Draw loss and accuracy of each quickstart on white, which is readable on light and dark pages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(7.6, 7.2), layout="constrained", facecolor="white")
    for axis, (run, (title, accuracy, what)) in zip(axes.flat, PANELS.items(), strict=False):
        loss, recall = found[run, "train/loss"], found[run, accuracy]
        axis.plot(loss["steps"], loss["values"], color=BLUE)
        axis.set_ylim(0)
        axis.tick_params(axis="y", colors=BLUE)
        right = axis.twinx()
        right.plot(recall["steps"], recall["values"], color=ORANGE, marker="o", markersize=4)
        right.set_ylim(0, 100)
        right.tick_params(axis="y", colors=ORANGE)
        if loss["stopped"]:
            axis.axvline(loss["stopped"], color=GREY, linestyle=":")
        axis.set_title(f"{title}: loss, {what} (%)", fontsize=11)
    axes.flat[-2].set_xlabel("step")
    key = axes.flat[-1]
    key.axis("off")
    key.plot([], [], color=BLUE, label="loss in training (left axis)")
    key.plot([], [], color=ORANGE, marker="o", markersize=4, label="validation, percent (right axis)")
    key.plot([], [], color=GREY, linestyle=":", label="stopped by Ctrl-C, and resumed")
    key.legend(loc="center", frameon=False, fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_coefficients(found: dict[tuple[str, str], Curve], target: Path) -> None:
    """Draw the coefficients of both towers' sums against the layers of the auxiliary."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.0), layout="constrained", facecolor="white", sharey=True)
    for axis, (tower, title) in zip(axes, (("vision", "image tower"), ("text", "text tower")), strict=True):
        for kind, color, marker, name in (
            ("", BLUE, "o", "the tower's own block"),
            ("_multimodal", ORANGE, "s", "shared block"),
        ):
            values = found[LEARNGENE, f"coefficients.{tower}{kind}"]["values"]
            axis.plot(range(len(values)), values, color=color, marker=marker, label=name)
            axis.set_xticks(range(len(values)), [f"{2 * pair + 1}, {2 * pair + 2}" for pair in range(len(values))])
        axis.axhline(0.5**0.5, color=GREY, linestyle=":", label="at the start")
        axis.set_xlabel("layers of the auxiliary")
        axis.set_title(title, fontsize=11)
    axes[0].set_ylabel("coefficient")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main(runs: str | None = None) -> None:
    """Store what the runs have, if a folder is given, and draw both figures."""
    found = read()
    if runs:
        found |= {(line["run"], line["tag"]): line for line in collect(Path(runs))}
        DATA.write_text("".join(json.dumps(line) + "\n" for line in found.values()), encoding="utf-8")
    draw_curves(found, IMAGES / "quickstart_curves.png")
    draw_coefficients(found, IMAGES / "learngene_coefficients.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
