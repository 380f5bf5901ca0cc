r"""The paper's ablations of CoCoRD: encoders, momenta, losses (Tables 5 to 7), temperature and queue (Fig. 3).

    python benchmarks/cocord_sweeps.py runs/sweeps
    python benchmarks/cocord_sweeps.py runs/sweeps --sweeps momenta --seeds 0 1 --epochs 30

Every setting is trained with each seed by the paper's recipe: resnet110 to resnet32 on CIFAR-100, 240 epochs; train
the teacher first (configs/cocord/teacher_resnet110.yaml). With other epochs the learning rate decays after 62.5, 75 and
87.5 percent of them. `--config` names other configs, and arguments after `--` are passed to every run.

Each setting's row is added to `sweeps.md` in the folder, and printed, when its runs are complete: the mean and the
deviation of the top-1 accuracy of validation, of the last and of the best epoch, beside the paper's. The same command
resumes interrupted runs. Settings that two sweeps share are trained once.

Option F of Table 5, a dictionary without its encoder, is in no sweep: the paper does not define it. The text of the
paper has no numbers of Fig. 3, and no sizes of its queues.
"""

import argparse
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tables import Curve, fit, spread

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "cocord"


class Setting(NamedTuple):
    """A row of a sweep."""

    name: str
    words: list[str]
    paper: str = "-"


def _encoders(contrast: str, prediction: str) -> list[str]:
    return [f"--model.contrast.encoder={contrast}", f"--model.prediction.encoder={prediction}"]


def _momenta(slow_student: str, teacher_head: str, paper: str) -> Setting:
    words = [f"--model.momentum.slow_student={slow_student}", f"--model.momentum.teacher_head={teacher_head}"]
    return Setting(f"m_r {slow_student}, m_c {teacher_head}", words, paper)


SWEEPS = {
    "encoders": [
        Setting("A: contrast teacher, cognate slow student", _encoders("teacher", "slow_student"), "74.07 ± 0.14"),
        Setting(
            "B: contrast slow student, cognate slow student", _encoders("slow_student", "slow_student"), "68.56 ± 0.78"
        ),
        Setting("C: contrast slow student, cognate teacher", _encoders("slow_student", "teacher"), "72.18 ± 0.37"),
        Setting("D: contrast teacher, cognate teacher", _encoders("teacher", "teacher"), "73.71 ± 0.34"),
        Setting("E: contrast teacher, no cognate", ["--model.prediction.weight=0"], "72.92 ± 0.23"),
    ],
    "momenta": [
        _momenta("0", "0", "73.00 ± 0.33"),
        _momenta("0.9", "0", "72.87 ± 0.32"),
        _momenta("0.9", "0.9", "73.34 ± 0.23"),
        _momenta("0.9", "0.99", "73.89 ± 0.24"),
        _momenta("0.9", "0.999", "74.07 ± 0.14"),
        _momenta("0.9", "0.9999", "73.70 ± 0.32"),
        _momenta("0.9", "1", "73.80 ± 0.12"),
        _momenta("0", "0.999", "73.80 ± 0.25"),
        _momenta("0.99", "0.999", "73.65 ± 0.22"),
        _momenta("0.999", "0.999", "73.54 ± 0.52"),
        _momenta("0.9999", "0.999", "72.93 ± 0.40"),
        _momenta("1", "0.999", "72.86 ± 0.50"),
        _momenta("1", "1", "73.12 ± 0.20"),
    ],
    "losses": [
        Setting("all", [], "74.20 ± 0.14"),
        Setting("without labels", ["--model.class_weight=0"], "fails"),
        Setting("without contrast", ["--model.contrast.weight=0"], "71.81 ± 0.42"),
        Setting("without prediction", ["--model.prediction.weight=0"], "72.92 ± 0.23"),
    ],
    "temperature": [
        Setting(f"tau {value}", [f"--model.contrast.temperature={value}"])
        for value in ("0.07", "0.08", "0.09", "0.1", "0.11")
    ],
    "queue": [
        Setting(f"N {size}", [f"--model.contrast.queue_size={size}"])
        for size in (256, 512, 1024, 2048, 4096, 8192, 16384)
    ],
}
"""Settings by sweep, with the paper's accuracy in percent."""
SOURCES = {
    "encoders": "Table 5",
    "momenta": "Table 6",
    "losses": "Table 7",
    "temperature": "Fig. 3a",
    "queue": "Fig. 3b",
}
DEFAULTS = {
    *("--model.contrast.encoder=teacher", "--model.prediction.encoder=slow_student"),
    *("--model.momentum.slow_student=0.9", "--model.momentum.teacher_head=0.999"),
    *("--model.contrast.temperature=0.1", "--model.contrast.queue_size=2048"),
}
"""Arguments that change nothing, so that the default setting is trained once for all sweeps."""


def folder_name(setting: Setting) -> str:
    """Return the name of a setting's folders: its arguments that are not defaults."""
    changed = [word.removeprefix("--model.") for word in setting.words if word not in DEFAULTS]
    return ",".join(changed) or "default"


def train(folder: Path, words: list[str], options: argparse.Namespace) -> Curve:
    """Train a run of a sweep unless it is complete."""
    milestones = [round(options.epochs * share) for share in (0.625, 0.75, 0.875)]
    command = ["--model", "CoCoRDModule", *words, f"--model.optim.lr_milestones={milestones}", *options.words]
    return fit(folder, command, options.epochs, "val/top1", options.threads)


def row(setting: Setting, curves: list[Curve]) -> str:
    """Return the Markdown row of a setting, given the curve of each seed."""
    last = [list(curve.values())[-1]["val/top1"] for curve in curves]
    best = [max(values["val/top1"] for values in curve.values()) for curve in curves]
    return f"| {setting.name} | {setting.paper} | {spread(last).strip()} | {spread(best).strip()} |"


def main() -> None:
    """Train missing runs, and write a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    recipe = [CONFIGS / "base.yaml", CONFIGS / "pairs/resnet110_resnet32.yaml"]
    parser.add_argument("--config", type=Path, nargs="+", default=recipe, help="the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=240)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.words = sys.argv[split + 1 :]

    def run(setting: Setting, seed: int) -> Curve:
        words = [f"--config={path}" for path in options.config] + [*setting.words, f"--seed_everything={seed}"]
        return train(options.folder / f"{folder_name(setting)}_seed{seed}", words, options)

    options.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool, (options.folder / "sweeps.md").open("w") as file:
        runs: dict[tuple[str, int], Future[Curve]] = {}
        for name in options.sweeps:
            for setting in SWEEPS[name]:
                for seed in options.seeds:
                    if (key := (folder_name(setting), seed)) not in runs:
                        runs[key] = pool.submit(run, setting, seed)
        for name in options.sweeps:
            title = f"{name} ({SOURCES[name]}), {options.epochs} epochs, seeds {', '.join(map(str, options.seeds))}"
            lines = [f"\n{title}\n", "| setting | paper | last epoch | best epoch |", "|---|---|---|---|"]
            for setting in SWEEPS[name]:
                lines.append(row(setting, [runs[folder_name(setting), seed].result() for seed in options.seeds]))
                print("\n".join(lines), flush=True)
                print("\n".join(lines), file=file, flush=True)
                lines = []


if __name__ == "__main__":
    main()
