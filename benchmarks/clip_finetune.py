r"""Ways of fine-tuning a small published CLIP: recall on the new data, and what is forgotten, over seeds.

    python benchmarks/clip_finetune.py runs/finetune --cifar cifar10/train.parquet cifar10/test.parquet \
        --train fashion/train.parquet --validation fashion/validation.parquet --test fashion/test.parquet

A small CLIP is trained on CIFAR-10 with captions made of its labels and exported as a folder of open_clip's: the
published model. Each way fine-tunes it on the pairs, with the defaults of `configs/clip/finetune.yaml` but for `RATES`.
The guard is zero-shot accuracy on CIFAR-10's test split. Models between the published one and that of "full" are
tested, too (WiSE-FT).

Every run writes its results to the given folder; the same command continues interrupted runs, and only prints finished
ones. It prints a table and draws recall against guard accuracy (`finetune.png`).
"""

import argparse
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

from tables import CLI, evaluate, fit, last_checkpoint, run, spread

ROOT = Path(__file__).resolve().parent.parent
SIZE, TOKENS = 64, 24
MODEL = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": SIZE, "patch_size": 8, "width": 192, "head_width": 64, "layers": 6},
    "text_cfg": {"context_length": TOKENS, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 4},
}
TEMPLATES = (
    "a photo of a {}",
    "a small {}",
    "a picture of one {}",
    "{}",
    "this is a {}",
    "a low resolution photo of a {}",
)
PROMPTS = ["a photo of a {}", "{}"]
WAYS = {
    "full": [],
    "image tower locked": ["--model.tuning.lock_image=all"],
    "layer-wise decay 0.7": ["--model.tuning.layer_decay=0.7"],
    "LoRA, rank 16": ["--model.tuning.lora.rank=16"],
    "sigmoid loss": ["--model.loss.name=sigmoid"],
}
"""Arguments of each way."""
RATES = {"LoRA, rank 16": 2e-3}
"""Peak learning rates of ways, for a model that is a hundredth of a published one's size; 1e-4 else."""
RATIOS = (0.25, 0.5, 0.75)
REACHED, GUARD = "test/recall_mean", "test/guard_top1"
TRAIN, GUARD_SET = "pairs.parquet", "guard.parquet"


def prepare(options: argparse.Namespace) -> None:
    """Write the pairs of CIFAR-10, the guard's images, and the pairs to train on."""
    import datasets

    target = options.folder / "cifar_pairs.parquet"
    if target.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)

    def drawn(file: Path, column: str, most: int) -> Any:
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train")
        rows = rows.cast_column(column, datasets.Image(decode=False))
        return rows.shuffle(seed=0).select(range(min(most, len(rows))))

    drawn(options.train, "image", options.pairs).to_parquet(options.folder / TRAIN)
    drawn(options.cifar[1], "img", options.guard_images).to_parquet(options.folder / GUARD_SET)
    rows = drawn(options.cifar[0], "img", options.pretraining_pairs).rename_column("img", "image")
    names, draw = rows.features["label"].names, random.Random(0)
    rows = rows.map(lambda row: {"caption": draw.choice(TEMPLATES).format(names[row["label"]])})
    rows.to_parquet(target)
    (options.folder / "model.json").write_text(json.dumps({"name": "small", "config": MODEL}))
    (options.folder / "classes.txt").write_text("\n".join(names))


def guard(options: argparse.Namespace) -> str:
    """Return the argument that adds the zero-shot accuracy on CIFAR-10's images."""
    images = str(options.folder / GUARD_SET)
    data = {"validation": images, "test": images, "image_column": "img", "num_classes": 10, "eval_batch_size": 250}
    callback = {
        "name": "guard",
        "templates": PROMPTS,
        "class_names": str(options.folder / "classes.txt"),
        "data": {"class_path": "ImageClassificationDataModule", "init_args": data | {"num_workers": 0}},
        "every_n_epochs": options.epochs,
    }
    return f"--trainer.callbacks={json.dumps([{'class_path': 'ZeroShotClassification', 'init_args': callback}])}"


def words(options: argparse.Namespace, train: Path, seed: int) -> list[str]:
    """Return the arguments of every training."""
    found = [f"--config={ROOT / 'configs/clip/finetune.yaml'}", f"--seed_everything={seed}"]
    found += [f"--data.train={train}", f"--data.max_tokens={TOKENS}", "--data.num_workers=0", "--data.batch_size=128"]
    found += [f"--data.validation={options.validation}", "--trainer.precision=bf16-mixed", "--trainer.accelerator=cpu"]
    found += ["--model.match_equal_texts=true"]  # drawn captions repeat
    return [*found, guard(options), "--trainer.enable_model_summary=false"]


def publish(options: argparse.Namespace) -> Path:
    """Train the model to fine-tune and export it, unless that is done; return its folder."""
    folder = options.folder / "published"
    if folder.is_dir():
        return folder
    own = [f"--model.model={options.folder / 'model.json'}", "--model.optim.learning_rate=1e-3"]
    own += [f"--data.image_size={SIZE}", "--model.tuning.batch_norm=trained"]
    epochs, place = options.pretraining_epochs, options.folder / "runs/pretraining"
    given = [*words(options, options.folder / "cifar_pairs.parquet", 0), *own]
    fit(place, given, epochs, "val/recall_mean", options.threads, every=epochs)
    run(["export", str(last_checkpoint(place)), str(folder)], place / "output.txt", options.threads)
    return folder


def tune(way: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Fine-tune and test unless that is done; return the test results, seconds and peak memory in MiB."""
    place = options.folder / "runs" / f"{way.replace(' ', '_').replace(',', '')}_seed{seed}"
    cost = place / "cost.json"
    own = [f"--model.weights={options.folder / 'published'}", f"--model.optim.learning_rate={RATES.get(way, 1e-4)}"]
    if not cost.is_file():
        start = time.perf_counter()
        given = [*words(options, options.folder / TRAIN, seed), *own, *WAYS[way]]
        fit(place, given, options.epochs, "val/recall_mean", options.threads, every=options.epochs)
        peak = max(int(found) for found in re.findall(r"Peak memory: (\d+) MiB", (place / "output.txt").read_text()))
        cost.write_text(json.dumps({"seconds": time.perf_counter() - start, "peak": peak}))
    return tested(place, options) | json.loads(cost.read_text())


def tested(place: Path, options: argparse.Namespace) -> dict[str, float]:
    """Test the last checkpoint of a run unless that is done."""
    return evaluate(
        place, [f"--data.test={options.test}", "--trainer.accelerator=cpu", guard(options)], options.threads
    )


def between(ratio: float, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Test the model between the published one and that of "full" unless that is done."""
    from vlightning.callbacks import AtomicCheckpointIO
    from vlightning.lightning_modules import CLIPModule

    place = options.folder / "runs" / f"wise_{ratio}_seed{seed}"
    target = place / "version_0/checkpoints/last.ckpt"
    if not target.is_file():
        source = last_checkpoint(options.folder / "runs" / f"full_seed{seed}")
        assert source is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        content = CLIPModule.interpolated(AtomicCheckpointIO().load_checkpoint(source), str(source), ratio)
        AtomicCheckpointIO().save_checkpoint(content, target)
    return tested(place, options)


def begin(options: argparse.Namespace) -> dict[str, float]:
    """Test the published model unless that is done."""
    place = options.folder / "runs/published"
    results = place / "test.json"
    if not results.is_file():
        place.mkdir(parents=True, exist_ok=True)
        given = [word for word in words(options, options.folder / TRAIN, 0) if not word.startswith("--data.train=")]
        given += [f"--model.weights={options.folder / 'published'}", f"--data.test={options.test}"]
        given += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={place}", "--trainer.logger.name=test"]
        run(["test", *given, "--trainer.enable_progress_bar=false"], place / "output.txt", options.threads, CLI)
        (file,) = place.glob("test/version_*/metrics.json")
        results.write_text(json.dumps(json.loads(file.read_text())["metrics"]))
    found: dict[str, float] = json.loads(results.read_text())
    return found


def main() -> None:
    """Run missing trainings, print the table, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of all results")
    parser.add_argument("--cifar", type=Path, nargs=2, required=True, help="train and test, with img and label")
    for name in ("train", "validation", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="parquet with image and caption")
    parser.add_argument("--pretraining-pairs", type=int, default=20_000)
    parser.add_argument("--pretraining-epochs", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=4_000, help="pairs to train on")
    parser.add_argument("--guard-images", type=int, default=2_500, help="images of CIFAR-10's test split")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    for name in ("train", "validation", "test"):
        setattr(options, name, getattr(options, name).resolve())
    options.cifar = [path.resolve() for path in options.cifar]

    prepare(options)
    publish(options)
    start = begin(options)
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:  # a whole table for the first seed first
        for way in WAYS:
            rows.setdefault(way, []).append(tune(way, seed, options))
        for ratio in RATIOS:
            rows.setdefault(f"WiSE-FT {ratio:g}", []).append(between(ratio, seed, options))
    print("| way | test mean recall | guard accuracy | minutes | peak MiB |\n|---|---|---|---|---|")
    print(f"| published | {start[REACHED]:.2f} | {start[GUARD]:.2f} | | |")
    for way, found in rows.items():
        cells = [spread([one[REACHED] for one in found]), spread([one[GUARD] for one in found])]
        if "seconds" in found[0]:
            minutes = statistics.mean(one["seconds"] for one in found) / 60
            cells += [f"{minutes:.1f}", f"{max(one['peak'] for one in found):.0f}"]
        else:
            cells += ["", ""]
        print(f"| {way} | {' | '.join(cells)} |")
    draw(start, rows, options.folder / "finetune.png")


def draw(start: dict[str, float], rows: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw recall on the new data against guard accuracy, a point a seed; the models of WiSE-FT are connected."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    axes.scatter([start[GUARD]], [start[REACHED]], marker="*", s=160, color="black", label="published")
    for way, found in rows.items():
        if not way.startswith("WiSE"):
            axes.scatter([one[GUARD] for one in found], [one[REACHED] for one in found], label=way)
    line = [[start], *(rows[f"WiSE-FT {ratio:g}"] for ratio in RATIOS), rows["full"]]
    means = [[statistics.mean(one[name] for one in point) for point in line] for name in (GUARD, REACHED)]
    axes.plot(*means, color="grey", linestyle=":", marker=".", label="WiSE-FT, 0 to 1", zorder=0)
    axes.set_xlabel("guard: zero-shot accuracy on CIFAR-10, %")
    axes.set_ylabel("mean recall on the new pairs, %")
    axes.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
