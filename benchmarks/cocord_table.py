r"""A table of plain training, of baselines (KD, FitNet, AT, CRD), and of CoCoRD: rows x seeds, with mean and spread.

    python benchmarks/cocord_table.py runs/table --teacher resnet20 --student resnet8 --epochs 20 -- \
        --data ImageClassificationDataModule --data.train train.parquet --data.validation test.parquet

Arguments after `--` are passed to every run of `vlightning fit`, also the teacher's; those of the data are required.
The teacher is trained first on the same images, unless one is given. All runs have equal epochs, and a learning rate
that decays after 62.5, 75 and 87.5 percent of them, as in the CRD benchmark.

Every run writes its results to the given folder; the same command resumes interrupted runs, and only prints complete
ones. Accuracy is that of the validation split, at the last and at the best epoch; the best epoch is selected on the
images that it is measured on.
"""

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tables import Curve, fit, spread

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "cocord"
ROWS = {
    "vanilla": ["--config=vanilla.yaml"],
    "KD": ["--config=kd.yaml"],
    "FitNet": ["--config=fitnet.yaml"],
    "AT": ["--config=at.yaml"],
    "CRD": ["--config=crd.yaml"],
    "CoCoRD": [],
    "CRD+KD": ["--config=crd.yaml", "--model.kd.weight=1"],
    "CoCoRD+KD": ["--config=cocord_kd.yaml"],
}
"""Arguments of each row, with configs of `CONFIGS`, in the order of the paper's Table 1."""


def train(folder: Path, words: list[str], options: argparse.Namespace) -> Curve:
    """Train a run of the table unless it is complete."""
    milestones = [round(options.epochs * share) for share in (0.625, 0.75, 0.875)]
    command = ["--model", "CoCoRDModule", *words, f"--model.optim.lr_milestones={milestones}", *options.words]
    return fit(folder, command, options.epochs, "val/top1", options.threads)


def main() -> None:
    """Train missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--teacher", default="resnet20")
    parser.add_argument("--student", default="resnet8")
    parser.add_argument("--teacher-weights", help="a trained teacher; by default one is trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.words = sys.argv[split + 1 :]

    weights = options.teacher_weights
    if weights is None:
        place = options.folder / "teacher"
        words = ["--config", str(CONFIGS / "vanilla.yaml"), "--model.student", options.teacher, "--seed_everything=0"]
        last = list(train(place, words, options).values())[-1]
        print(f"teacher {options.teacher}: top-1 {last['val/top1']:.2f}, top-5 {last['val/top5']:.2f}", flush=True)
        weights = str(place)

    def run(job: tuple[int, str]) -> Curve:
        seed, row = job
        words = [word.replace("--config=", f"--config={CONFIGS}/") for word in ROWS[row]]
        words += ["--model.student", options.student, f"--seed_everything={seed}"]
        if row != "vanilla":
            words += ["--model.teacher.name", options.teacher, "--model.teacher.weights", weights]
        return train(options.folder / f"{row}_seed{seed}", words, options)

    jobs = [(seed, row) for seed in options.seeds for row in options.rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        curves = dict(zip(jobs, pool.map(run, jobs), strict=True))

    print(f"\n{options.student}, {options.epochs} epochs, seeds {options.seeds}; mean and deviation in percent")
    print(f"{'':12} {'top-1, last':>14} {'top-1, best':>14} {'top-5, last':>14}   each seed's last top-1")
    for row in options.rows:
        runs = [curves[seed, row] for seed in options.seeds]
        last = [list(curve.values())[-1] for curve in runs]
        best = [max(values["val/top1"] for values in curve.values()) for curve in runs]
        top1 = [values["val/top1"] for values in last]
        each = " ".join(f"{value:.2f}" for value in top1)
        print(f"{row:12} {spread(top1)} {spread(best)} {spread([values['val/top5'] for values in last])}   {each}")

    print("\ntop-1 by epoch, mean over the seeds; in brackets the share of dictionary keys with the query's class")
    for epoch in range(options.epochs):
        cells = []
        for row in options.rows:
            values = [curves[seed, row].get(epoch, {}) for seed in options.seeds]
            cell = f"{row} {statistics.mean(v.get('val/top1', float('nan')) for v in values):.2f}"
            shares = [v["train/same_class_keys"] for v in values if "train/same_class_keys" in v]
            cells.append(cell + (f" ({statistics.mean(shares):.1%})" if shares else ""))
        print(f"  {epoch + 1:3}: " + "  ".join(cells))


if __name__ == "__main__":
    main()
