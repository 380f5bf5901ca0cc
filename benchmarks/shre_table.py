r"""Ablation of SHRe: retrieval, classification of images and of titles, and a linear probe, over seeds.

    python benchmarks/shre_table.py runs/shre --train train.parquet --validation validation.parquet --test test.parquet

The data has a title and a label for each image. The teacher is a ResNet-20 that is trained on the labels first. Rows:
SHRe as in the thesis; without the teacher; contrast of one result; other temperatures of the posteriors; the shared
Transformer layer. Retrieval is measured on the test split in both spaces. Images and titles of the test split are
classified by the model's own logits, which learned the labels from the teacher. The probe is a linear layer on the
image encoder's tokens, trained on the training labels.

Every run writes its results to the given folder; the same command resumes interrupted runs, and only prints complete
ones.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tables import evaluate, fit, last_checkpoint, run, spread

SIZE, TOKENS, CLASSES = 64, 24, 66
ROWS: dict[str, list[str]] = {
    "SHRe": [],
    "KL off": ["--model.kl.weight=0"],
    "ITC on h2": ['--model.contrast.layers=["h2"]'],
    "ITC on h1": ['--model.contrast.layers=["h1"]'],
    "ITC on h3": ['--model.contrast.layers=["h3"]'],
    "T = 0.5": ["--model.kl.temperature=0.5"],
    "T = 2": ["--model.kl.temperature=2"],
    "Transformer": ["--model.shared=transformer"],
}
ENCODER = ["--model.vision.patch_size=16", "--model.vision.width=128", "--model.vision.heads=4"]
ENCODER += ["--model.vision.depth=4", "--model.vision.post_norm=false"]
MEASURED = "val/h2/recall_mean"
HERE = str(Path(__file__).resolve())


def transforms() -> list[str]:
    """Return the arguments of the image transforms for teacher, student and probe."""
    crop = {"size": SIZE, "scale": [0.9, 1.0], "rand_augment": False}
    train = {"class_path": "ALBEFTrainTransform", "init_args": crop}
    evaluation = {"class_path": "ALBEFEvalTransform", "init_args": {"size": SIZE}}
    words = [f"--data.image_size={SIZE}", f"--data.train_transform={json.dumps(train)}", "--data.num_workers=0"]
    return [*words, f"--data.eval_transform={json.dumps(evaluation)}", "--trainer.enable_model_summary=false"]


def splits(options: argparse.Namespace, *names: str) -> list[str]:
    """Return the arguments of the data's files."""
    return [f"--data.{name}={getattr(options, name).resolve()}" for name in names]


def labeled(options: argparse.Namespace) -> list[str]:
    """Return the arguments of a training on labels."""
    words = ["--data=ImageClassificationDataModule", f"--data.label_column={options.label}", "--data.batch_size=128"]
    return [*words, f"--data.num_classes={CLASSES}", *transforms(), *splits(options, "train", "validation")]


def train_teacher(options: argparse.Namespace) -> Path:
    """Train the classifier unless that is done, and return its folder."""
    place = options.folder / "teacher"
    epochs = options.teacher_epochs
    words = ["--model=CoCoRDModule", "--model.student=resnet20", "--model.contrast.weight=0", "--seed_everything=0"]
    words += ["--model.prediction.weight=0", f"--model.optim.lr_milestones=[{epochs * 6 // 10},{epochs * 8 // 10}]"]
    fit(place, [*words, *labeled(options)], epochs, "val/top1", options.threads, every=epochs // 5)
    evaluate(place, splits(options, "test"), options.threads)
    return place


def distil(row: str, seed: int, teacher: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train, test and probe unless that is done, and return the results."""
    place = options.folder / "runs" / f"{row.replace(' ', '_').replace('=', '')}_seed{seed}"
    words = ["--model=SHReModule", "--model.teacher.name=resnet20", f"--model.teacher.weights={teacher}"]
    words += [f"--model.num_classes={CLASSES}", *ENCODER, "--model.text.depth=3", "--model.text.dropout=0.1"]
    words += ["--model.optim.learning_rate=1e-3", "--model.match_equal_texts=true"]
    words += [f"--seed_everything={seed}", *ROWS[row]]
    words += ["--data=ImageTextDataModule", f"--data.max_tokens={TOKENS}", "--data.vocab_size=4000", *transforms()]
    words += ["--data.batch_size=128", *splits(options, "train", "validation"), "--trainer.precision=bf16-mixed"]
    fit(place, words, options.epochs, MEASURED, options.threads, every=options.epochs // 4)
    labels = {"test": str(options.test.resolve()), "label_column": options.label, "num_workers": 0}
    data = {"class_path": "ImageClassificationDataModule", "init_args": labels}
    callback = {"class_path": "OwnClassification", "init_args": {"data": data}}
    own = [*splits(options, "test"), f"--trainer.callbacks={json.dumps([callback])}"]
    found = evaluate(place, own, options.threads)
    return found | titles(place, options) | probe(place, seed, options)


def titles(place: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the accuracy of the test split's titles in percent; computed unless that is done."""
    results = place / "titles.json"
    if not results.is_file():
        words = ["--titles", str(last_checkpoint(place)), str(options.test.resolve()), options.label, str(results)]
        run(words, place / "output.txt", options.threads, [HERE])
    found: dict[str, float] = json.loads(results.read_text())
    return found


def classify_titles(checkpoint: str, test: str, label: str, results: str) -> None:
    """Classify titles, in the process that `titles` starts."""
    import datasets
    import torch

    from vlightning.datamodules import ImageTextDataModule
    from vlightning.lightning_modules import SHReModule

    module = SHReModule.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).eval()
    encode = ImageTextDataModule.load_from_checkpoint(checkpoint, weights_only=True).encoder()
    rows = datasets.load_dataset("parquet", data_files=test, split="train")
    with torch.no_grad():
        logits = torch.cat(
            [module.classify_texts(**encode(rows["caption"][at : at + 128])) for at in range(0, len(rows), 128)]
        )
    right = logits.argmax(1) == torch.tensor(rows[label])
    Path(results).write_text(json.dumps({"titles": 100 * float(right.float().mean())}))


def probe(place: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train a linear probe of the image encoder unless that is done, and return the results."""
    words = ["--model=SHReImageClassifierModule", *ENCODER, f"--model.weights={last_checkpoint(place)}"]
    words += ["--model.optim.learning_rate=3e-3", "--model.mix.probability=0", "--model.mix.label_smoothing=0"]
    own = place / "probe"
    fit(own, [*words, f"--seed_everything={seed}", *labeled(options)], 10, "val/top1", options.threads, every=5)
    return {f"probe/{name}": value for name, value in evaluate(own, splits(options, "test"), options.threads).items()}


def table(found: dict[tuple[str, int], dict[str, float]], options: argparse.Namespace) -> list[str]:
    """Return the lines to print."""
    columns = {
        "h2 t2i R@1": "test/h2/text_to_image_r1",
        "h2 i2t R@1": "test/h2/image_to_text_r1",
        "h2 recall": "test/h2/recall_mean",
        "h3 recall": "test/h3/recall_mean",
        "h2 t2i rank": "test/h2/median_rank_text_to_image",
        "images": "test/supervised_teacher_top1",
        "titles": "titles",
        "probe": "probe/test/top1",
    }
    lines = [f"{options.epochs} epochs, seeds {options.seeds}, test split; recall and accuracy in percent"]
    lines.append(f"{'':14}" + "".join(f"{name:>16}" for name in columns))
    for row in options.rows:
        of_seeds = [found[row, seed] for seed in options.seeds]
        lines.append(
            f"{row:14}" + "".join(f"{spread([one[name] for one in of_seeds]):>16}" for name in columns.values())
        )
    return lines


def main() -> None:
    """Run missing trainings, and print the table."""
    if sys.argv[1:2] == ["--titles"]:
        classify_titles(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of all results")
    for split in ("train", "validation", "test"):
        parser.add_argument(f"--{split}", type=Path, required=True, help="parquet with image, caption and label")
    parser.add_argument("--label", default="label", help="column of the labels")
    parser.add_argument("--teacher-epochs", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    options: Any = parser.parse_args()
    options.folder = options.folder.resolve()

    teacher = train_teacher(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [(row, seed) for seed in options.seeds for row in options.rows]
        found = dict(zip(jobs, pool.map(lambda job: distil(*job, teacher, options), jobs), strict=True))
    taught = json.loads((teacher / "test.json").read_text())["test/top1"]
    print(f"The teacher's top-1 on the test split: {taught:.2f}")
    for line in table(found, options):
        print(line)


if __name__ == "__main__":
    main()
