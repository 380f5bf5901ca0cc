r"""The gain of each part of dataset reinforcement, for one student and equally many seen samples, over seeds.

The ladder: plain CLIP, + synthetic captions, + distillation from one teacher, + strong augmentation, + an ensemble.

    python benchmarks/mobileclip_ladder.py runs/ladder --train train.parquet --validation validation.parquet \
        --test test.parquet --attributes colour label gender

Two small teachers of different sizes are trained first on all training pairs, each with a title or a made caption at a
time, and written as folders that open_clip loads. Synthetic captions are made of the attribute columns by templates:
thing, colour and for whom; no captioner is trained. Some of the training pairs, drawn at random, are the student's: as
in the paper, teachers have seen more than students will. `vlightning predict` reinforces these three times (weak crops
with one teacher; strong augmentation with one, and with two), and the student trains on them.

Every run writes its results to the given folder; the same command continues interrupted runs, and only prints finished
ones. Recall and zero-shot accuracy are those of the test split at the last epoch. The
curve by which samples are counted is that of the validation split.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tables import Curve, evaluate, fit, last_checkpoint, run, spread

TEMPLATES = (
    "{colour} {thing} for {whom}",
    "a photo of {colour} {thing}",
    "{whom}'s {thing} in {colour}",
    "{thing}, {colour}",
    "an image of {thing} for {whom}",
)
PROMPTS = ["a photo of {}", "an image of {}", "{}"]
TOKENS, SIZE = 24, 64
TEACHERS = {"small": ("resnet10t", 64, 128, 2), "large": ("resnet18", 80, 192, 3)}
"""Image tower, image size, width of texts and embeddings, layers of the text tower."""
WEAK = ["--data.crop_scale=[0.9,1.0]", "--data.num_ops=0"]
STRONG = ["--data.crop_scale=[0.4,1.0]"]
SETS = {"weak": (WEAK, ["large"]), "strong": (STRONG, ["large"]), "ensemble": (STRONG, ["small", "large"])}
RUNGS = {
    "plain CLIP": ("weak", ["--model.captions=real", "--model.teacher.distillation_weight=0"]),
    "+ synthetic captions": ("weak", ["--model.teacher.distillation_weight=0"]),
    "+ distillation": ("weak", []),
    "+ augmentation": ("strong", []),
    "+ ensemble": ("ensemble", []),
}
REACHED = "val/text_to_image_r5"
HERE = Path(__file__).resolve()
PROGRAM = [str(HERE), "--run"]  # this file as the command line, to which the teachers' sizes are known


def teacher_config(name: str) -> dict[str, Any]:
    """Return open_clip's configuration of a teacher."""
    tower, size, width, layers = TEACHERS[name]
    vision = {"image_size": size, "timm_model_name": tower, "timm_model_pretrained": False}
    vision |= {"timm_pool": "avg", "timm_proj": "linear", "timm_drop": 0.0, "timm_drop_path": None}
    text = {"context_length": TOKENS, "vocab_size": 49408, "width": width, "heads": width // 32, "layers": layers}
    return {"embed_dim": width, "vision_cfg": vision, "text_cfg": text}


def command_line(words: list[str]) -> None:
    """Run the command line, or the export, with the teachers added to open_clip's list."""
    import runpy
    import tempfile

    import open_clip

    with tempfile.TemporaryDirectory() as folder:
        for name in TEACHERS:
            path = Path(folder) / f"ladder-{name}.json"
            path.write_text(json.dumps(teacher_config(name)))
            open_clip.add_model_config(path)
    sys.argv = ["vlightning", *words]
    runpy.run_module("vlightning.cli", run_name="__main__")


def prepare(options: argparse.Namespace) -> None:
    """Copy the splits with two more columns: generated captions, and these with the title."""
    import datasets

    colour, label, whom = options.attributes
    for split in ("train", "validation", "test"):
        target = options.folder / f"{split}.parquet"
        if target.is_file():
            continue
        rows = datasets.load_dataset("parquet", data_files=str(getattr(options, split)), split="train")
        rows = rows.cast_column("image", datasets.Image(decode=False))
        names = rows.features[label].names

        def captions(row: dict[str, Any], names: list[str] = names) -> dict[str, list[str]]:
            values = {"colour": str(row[colour]), "thing": names[row[label]], "whom": str(row[whom])}
            made = [template.format(**values).lower() for template in TEMPLATES]
            return {"synthetic": made, "captions": [row["caption"], row["caption"], *made]}

        target.parent.mkdir(parents=True, exist_ok=True)
        rows = rows.map(captions)
        rows.to_parquet(target)
        if split == "train":
            rows.shuffle(seed=0).select(range(min(options.pairs, len(rows)))).to_parquet(target.with_stem("student"))


def train_teacher(name: str, options: argparse.Namespace) -> None:
    """Train a teacher and write it for open_clip, unless that is done."""
    folder = options.folder / "teachers" / name
    if folder.is_dir():
        return
    place = options.folder / "runs" / f"teacher_{name}"
    words = ["--model=MobileCLIPModule", f"--model.model=ladder-{name}", "--model.teacher.distillation_weight=0"]
    words += ["--model.momentum.momentum=0.995", "--model.optim.warmup_steps=100", "--model.optim.weight_decay=0.1"]
    words += ["--model.optim.learning_rate=1e-3", "--model.optim.min_learning_rate=0"]
    words += ["--data=ImageTextDataModule", "--data.caption_column=captions", "--data.tokenizer=clip"]
    words += ["--data.vocab_size=49408", f"--data.image_size={TEACHERS[name][1]}", *shared(options)]
    words += ["--data.train", str(options.folder / "train.parquet")]
    fit(place, words, options.teacher_epochs, "val/recall_mean", options.threads, PROGRAM, every=5)
    checkpoint = last_checkpoint(place)
    run(["export", str(checkpoint), str(folder), "--layout=open_clip"], place / "output.txt", 1, PROGRAM)


def reinforce(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Reinforce the student's pairs unless that is done, and return the manifest."""
    folder = options.folder / "reinforced" / name
    augmentation, teachers = SETS[name]
    manifest = folder / "manifest.json"
    if not manifest.is_file() or not json.loads(manifest.read_text())["complete"]:
        weights = [{"weights": str(options.folder / "teachers" / teacher)} for teacher in teachers]
        words = ["predict", "--model=ReinforcementModule", f"--model.teachers={json.dumps(weights)}"]
        words += ["--data=ReinforcementDataModule", f"--data.pairs={options.folder / 'student.parquet'}"]
        words += [f"--data.folder={folder}", "--data.synthetic_column=synthetic", "--data.augmentations=5"]
        words += [f"--data.image_size={SIZE}", "--data.batch_size=64", "--data.num_workers=1", *augmentation]
        words += ["--data.embeddings=pth.gz", "--trainer.logger=false", "--trainer.precision=bf16-mixed"]
        run([*words, "--trainer.enable_progress_bar=false"], options.folder / "reinforced" / f"{name}.txt", 1, PROGRAM)
    content: dict[str, Any] = json.loads(manifest.read_text())
    return content


def shared(options: argparse.Namespace) -> list[str]:
    """Return the arguments of every training."""
    words = [f"--data.validation={options.folder / 'validation.parquet'}", f"--data.max_tokens={TOKENS}"]
    words += ["--data.batch_size=128", "--data.num_workers=0", "--model.match_equal_texts=true"]
    return [*words, "--trainer.precision=bf16-mixed", "--trainer.enable_model_summary=false"]


def climb(rung: str, seed: int, manifest: dict[str, Any], options: argparse.Namespace) -> tuple[Curve, dict[str, Any]]:
    """Train and test the student on a rung unless that is done; return the curve and the test's results."""
    reinforced, settings = RUNGS[rung]
    place = options.folder / "runs" / f"{rung.strip('+ ').replace(' ', '_')}_seed{seed}"
    teachers = manifest["teachers"]
    words = ["--model=MobileCLIPModule", "--model.model=MobileCLIP-tiny", "--model.momentum.momentum=null"]
    words += [f"--model.{key}={[teacher[part] for teacher in teachers]}" for key, part in _TEACHER_WORDS.items()]
    words += [
        "--model.optim.learning_rate=2e-3",
        "--model.optim.warmup_steps=60",
        *settings,
        f"--seed_everything={seed}",
    ]
    words += ["--data=ReinforcedImageTextDataModule", f"--data.train={options.folder / 'reinforced' / reinforced}"]
    words += [f"--data.image_size={SIZE}", *shared(options)]
    curve = fit(place, words, options.epochs, REACHED, options.threads, PROGRAM, every=2)
    labels = {"test": str(options.folder / "test.parquet"), "label_column": options.attributes[1]}
    data = {"class_path": "ImageClassificationDataModule", "init_args": labels | {"num_workers": 0}}
    callback = {"class_path": "ZeroShotClassification", "init_args": {"data": data, "templates": PROMPTS}}
    words = [f"--data.test={options.folder / 'test.parquet'}", f"--trainer.callbacks={json.dumps([callback])}"]
    found = evaluate(place, words, options.threads, PROGRAM)
    return curve, found


_TEACHER_WORDS = {"teacher.dims": "width", "teacher.scales": "scale"}


def reached(curve: Curve, level: float, each: int) -> float:
    """Return the samples seen when the curve first reaches a level; infinity if it never does."""
    return next(
        (float((epoch + 1) * each) for epoch, values in curve.items() if values[REACHED] >= level), float("inf")
    )


def main() -> None:
    """Run what is missing, and print."""
    if sys.argv[1:2] == ["--run"]:
        command_line(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is kept")
    for split in ("train", "validation", "test"):
        parser.add_argument(f"--{split}", type=Path, required=True, help="parquet with image and caption")
    parser.add_argument("--attributes", nargs=3, default=["colour", "label", "gender"], help="colour, thing, for whom")
    parser.add_argument("--pairs", type=int, default=2000, help="of the student")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--teacher-epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    options = parser.parse_args()
    options.folder = options.folder.resolve()

    prepare(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: train_teacher(name, options), TEACHERS))
        manifests = dict(zip(SETS, pool.map(lambda name: reinforce(name, options), SETS), strict=True))
        jobs = [(rung, seed) for seed in options.seeds for rung in options.rungs]
        climbed = pool.map(lambda job: climb(*job, manifests[RUNGS[job[0]][0]], options), jobs)
        found = dict(zip(jobs, climbed, strict=True))
    samples = manifests["weak"]["samples"] // 128 * 128
    for line in table(found, options, samples):
        print(line)


def table(found: dict[tuple[str, int], tuple[Curve, dict[str, Any]]], options: Any, samples: int) -> list[str]:
    """Return the lines to print."""
    columns: dict[str, Callable[[dict[str, float]], float]] = {
        "t2i R@1": lambda test: test["test/text_to_image_r1"],
        "t2i R@5": lambda test: test["test/text_to_image_r5"],
        "i2t R@5": lambda test: test["test/image_to_text_r5"],
        "mean recall": lambda test: test["test/recall_mean"],
        "zero-shot top-1": lambda test: test["test/zero_shot_top1"],
        "class recall": lambda test: test["test/zero_shot_class_recall"],
    }
    lines = [
        f"MobileCLIP-tiny, {options.epochs} epochs of {samples} samples, seeds {options.seeds}, test split, percent"
    ]
    lines.append(f"{'':22}" + "".join(f"{name:>17}" for name in columns) + "   samples to plain's R@5")
    for rung in options.rungs:
        tests = [found[rung, seed][1] for seed in options.seeds]
        cells = "".join(f"{spread([read(test) for test in tests]):>17}" for read in columns.values())
        needed = []
        for seed in options.seeds:
            level = list(found[options.rungs[0], seed][0].values())[-1][REACHED]
            needed.append(reached(found[rung, seed][0], level, samples))
        mean = statistics.mean(needed)
        shares = " ".join("never" if one == float("inf") else f"{one / 1000:.0f}k" for one in needed)
        lines.append(f"{rung:22}{cells}   {shares}" + ("" if mean == float("inf") else f" (mean {mean / 1000:.0f}k)"))
    return lines


if __name__ == "__main__":
    main()
