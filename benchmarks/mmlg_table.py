r"""Descendants of MM-LG, of TLEG and He-LG, and of random weights: retrieval after equal activation and fine-tuning.

    python benchmarks/mmlg_table.py runs/mmlg --train train.parquet --validation validation.parquet \
        --test test.parquet --attributes color label gender

A small teacher is trained first on all training pairs, each with its title or a generated caption. 2,000 randomly drawn
pairs are used for fine-tuning with titles. The other pairs, with titles and generated captions, are used for
extraction: with the teacher, auxiliaries of 12 layers are trained (MM-LG, TLEG), and a plain CLIP of 12 layers (He-LG).
Each descendant of 6 or 12 layers is activated for one epoch on a tenth of those pairs with the teacher, then fine-tuned
without it; "w/o MM" and "only MM" omit one kind of blocks in the expansion of MM-LG. All stages, including extraction,
are repeated with each seed.

Every run writes its results to the given folder; the same command resumes interrupted runs and computes missing ones.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mobileclip_ladder import PROGRAM, SIZE, TOKENS, prepare, train_teacher
from tables import Curve, evaluate, fit, last_checkpoint, spread

SIZES = {"towers.width": 128, "towers.heads": 4, "towers.embed_dim": 128, "vision.patch_size": 16}
STUDENTS = {"MM-LG": "MM-LG", "TLEG": "TLEG", "He-LG": "plain"}
"""Student that each method's learngene is extracted from."""
ROWS: dict[str, tuple[str | None, str, tuple[int, ...]]] = {
    "random weights": (None, "both", (12, 6)),
    "He-LG": ("He-LG", "both", (12, 6)),
    "TLEG": ("TLEG", "both", (12, 6)),
    "MM-LG": ("MM-LG", "both", (12, 6)),
    "MM-LG w/o MM": ("MM-LG", "unimodal", (6,)),
    "MM-LG only MM": ("MM-LG", "multimodal", (6,)),
}
"""Method, components and numbers of layers of each row's descendants."""
TEACHER = "small"
MEASURED = "val/karpathy5/recall_mean"


def split(options: argparse.Namespace) -> None:
    """Write the training pairs for extraction, activation and fine-tuning."""
    import datasets

    if (options.folder / "activate.parquet").is_file():
        return
    rows = datasets.load_dataset("parquet", data_files=str(options.folder / "train.parquet"), split="train")
    rows = rows.shuffle(seed=0)
    tune, extract = (rows.select(part) for part in (range(options.pairs), range(options.pairs, len(rows))))
    parts = {"tune": tune, "extract": extract, "activate": extract.select(range(len(extract) // 10))}
    for name, part in parts.items():
        part.to_parquet(options.folder / f"{name}.parquet")


def words(options: argparse.Namespace, student: str, layers: int, data: str, seed: int, rate: float) -> list[str]:
    """Return the arguments of every training."""
    crop = {"size": SIZE, "scale": [0.9, 1.0], "rand_augment": False, "horizontal_flip": 0.0}
    transform = {"class_path": "ALBEFTrainTransform", "init_args": crop}
    found = ["--model=MMLGModule", f"--model.student={student}", f"--model.towers.depth={layers}"]
    found += [f"--model.{name}={value}" for name, value in SIZES.items()]
    found += [
        f"--model.optim.learning_rate={rate}",
        "--model.match_equal_texts=true",
        f"--seed_everything={seed}",
    ]
    found += ["--data=ImageTextDataModule", f"--data.train={options.folder / data}.parquet", "--data.batch_size=128"]
    found += [f"--data.validation={options.folder / 'validation.parquet'}", f"--data.image_size={SIZE}"]
    found += ["--data.tokenizer=clip", "--data.vocab_size=49408", f"--data.max_tokens={TOKENS}", "--data.num_workers=0"]
    found += [f"--data.train_transform={json.dumps(transform)}", "--trainer.precision=bf16-mixed"]
    return [*found, "--trainer.enable_model_summary=false"]


def with_teacher(options: argparse.Namespace) -> list[str]:
    """Return the arguments of a training with the teacher."""
    return [f"--model.teacher.weights={options.folder / 'teachers' / TEACHER}", "--data.caption_column=captions"]


def extract(method: str, seed: int, options: argparse.Namespace) -> tuple[Path, Curve]:
    """Train an auxiliary unless that is done; return the learngene's file and the curve."""
    place = options.folder / "runs" / f"extract_{method}_seed{seed}"
    file = place / "learngene.safetensors"
    writer = [{"class_path": "LearngeneWriter", "init_args": {"file": str(file)}}]
    own = [*words(options, STUDENTS[method], 12, "extract", seed, 1e-3), *with_teacher(options)]
    own += ["--model.optim.warmup_steps=100", f"--trainer.callbacks={json.dumps(writer)}"]
    epochs = options.extraction_epochs
    return file, fit(place, own, epochs, MEASURED, options.threads, PROGRAM, every=epochs // 4)


def descend(row: str, layers: int, seed: int, file: Path | None, options: argparse.Namespace) -> dict[str, float]:
    """Expand, activate, fine-tune and test a descendant unless that is done; return the test results."""
    place = options.folder / "runs" / f"{row.replace(' ', '_').replace('/', '')}_{layers}_seed{seed}"
    activation = [
        *words(options, "plain", layers, "activate", seed, 5e-4),
        *with_teacher(options),
        "--data.batch_size=64",
    ]
    activation.append("--model.optim.warmup_steps=1")
    if file is not None:
        start = {"file": str(file), "target": "student", "components": ROWS[row][1]}
        expansion = [{"class_path": "LearngeneExpansionCallback", "init_args": start}]
        activation.append(f"--trainer.callbacks={json.dumps(expansion)}")
    fit(place / "activation", activation, 1, MEASURED, options.threads, PROGRAM)
    tuning = words(options, "plain", layers, "tune", seed, options.learning_rate)
    tuning += ["--model.teacher.distillation_weight=0", f"--model.weights={last_checkpoint(place / 'activation')}"]
    fit(place, [*tuning, "--model.optim.warmup_steps=15"], options.epochs, MEASURED, options.threads, PROGRAM, every=5)
    return evaluate(place, [f"--data.test={options.folder / 'test.parquet'}"], options.threads, PROGRAM)


def main() -> None:
    """Run missing trainings, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of all results")
    for name in ("train", "validation", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="parquet with image and caption")
    parser.add_argument(
        "--attributes", nargs=3, default=["color", "label", "gender"], help="columns of color, product and customer"
    )
    parser.add_argument("--pairs", type=int, default=2000, help="number of pairs for fine-tuning")
    parser.add_argument("--teacher-epochs", type=int, default=30)
    parser.add_argument("--extraction-epochs", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=10, help="epochs of fine-tuning")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="learning rate of fine-tuning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    options = parser.parse_args()
    options.folder = options.folder.resolve()

    prepare(options)
    split(options)
    train_teacher(TEACHER, options)
    with ThreadPoolExecutor(options.jobs) as pool:
        sources = [(method, seed) for seed in options.seeds for method in STUDENTS]
        extracted = {source: pool.submit(extract, *source, options) for source in sources}

        def job(row: str, layers: int, seed: int) -> dict[str, float]:
            method = ROWS[row][0]
            file = None if method is None else extracted[method, seed].result()[0]
            return descend(row, layers, seed, file, options)

        jobs = [(row, layers, seed) for seed in options.seeds for row in ROWS for layers in ROWS[row][2]]
        found = dict(zip(jobs, pool.map(lambda key: job(*key), jobs), strict=True))
    for line in table(found, {source: future.result()[1] for source, future in extracted.items()}, options):
        print(line)


def table(found: dict[tuple[str, int, int], dict[str, float]], curves: dict[Any, Curve], options: Any) -> list[str]:
    """Return the lines to print."""
    columns = {
        "t2i R@1": "test/karpathy5/text_to_image_r1",
        "i2t R@1": "test/karpathy5/image_to_text_r1",
        "t2i R@5": "test/karpathy5/text_to_image_r5",
        "i2t R@5": "test/karpathy5/image_to_text_r5",
        "mean recall": "test/karpathy5/recall_mean",
    }
    lines = [
        f"Auxiliaries after {options.extraction_epochs} epochs, mean validation recall of titles and generated captions"
    ]
    for method in STUDENTS:
        ends = [list(curves[method, seed].values())[-1][MEASURED] for seed in options.seeds]
        lines.append(f"{method:22}{spread(ends):>17}")
    lines.append(f"Descendants after {options.epochs} epochs, test split, seeds {options.seeds}, percent")
    lines.append(f"{'':22}" + "".join(f"{name:>17}" for name in columns))
    for layers in (12, 6):
        for row in ROWS:
            if layers in ROWS[row][2]:
                tests = [found[row, layers, seed] for seed in options.seeds]
                cells = "".join(f"{spread([test[name] for test in tests]):>17}" for name in columns.values())
                lines.append(f"{row + f', {layers} layers':22}{cells}")
    return lines


if __name__ == "__main__":
    main()
