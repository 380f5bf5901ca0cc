r"""One comparison of all methods that embed images and texts, on drawn shapes; and of CoCoRD with KD and CRD.

    python benchmarks/compare.py runs/compare results.jsonl

All read the same images and captions in batches of the same size, and have towers of the same shape: `WIDTH`,
`LAYERS`, patches of 12 of 48 pixels. Tokens differ: CLIP, MobileCLIP and MM-LG have CLIP's, ALBEF and SHRe a WordPiece
vocabulary of the captions' words. Each method trains on equally many pairs with three seeds, and for equally many
seconds, by the speed of its first run, with two. What a method needs before that is made once and timed by itself: a
larger CLIP, which reinforces the pairs for MobileCLIP and teaches the auxiliary of MM-LG's learngene; and SHRe's
classifier of single shapes.

A run appends one line of JSON to the results when it is done. The same command goes on where it was stopped: finished
runs are skipped, and an interrupted one is repeated. Every run is a process of its own, forked with everything
imported, with one thread. `docs/figures/comparison.py` makes the table and the figure of the results.
"""

import argparse
import csv
import io
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.constants import OPENAI_DATASET_MEAN as MEAN
from open_clip.constants import OPENAI_DATASET_STD as STD
from timing import seconds

from vlightning import callbacks, lightning_modules
from vlightning.cli import main as vlightning

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SIZE, PATCH, TOKENS, BATCH = 48, 12, 16, 64
WIDTH, HEADS, LAYERS, EMBED, FUSED = 64, 2, 6, 64, 2
RERANKED = 32  # candidates of a query that ALBEF's matching head reorders
PLAIN, LARGER = "compared-clip", "compared-larger-clip"
BEFORE, EQUAL_SAMPLES, EQUAL_TIME = "before", "equal samples", "equal time"
METHODS = ("CLIP", "MobileCLIP", "MM-LG", "SHRe", "ALBEF")
TOWERS = {"patch_size": PATCH, "width": WIDTH, "depth": LAYERS, "heads": HEADS}
CLIP_TEXTS = ["--data.tokenizer=clip", "--data.vocab_size=49408", f"--data.max_tokens={TOKENS}"]
OWN_TEXTS = ["--data.vocab_size=320", f"--data.max_tokens={TOKENS}"]
STUDENTS = {
    "labels": ["vanilla.yaml"],
    "KD": ["kd.yaml"],
    "CRD": ["crd.yaml"],
    "CoCoRD": [],
}
"""Configs of CoCoRD's baselines, on top of its quickstart."""


def add_clip(folder: Path, name: str, width: int) -> None:
    """Add a CLIP to open_clip's models, under its name."""
    towers = {"width": width, "layers": LAYERS}
    vision = {"image_size": SIZE, "patch_size": PATCH, "head_width": width // HEADS, **towers}
    text = {"context_length": TOKENS, "vocab_size": 49408, "heads": HEADS, **towers}
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"embed_dim": EMBED, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(file)


def write_pairs(folder: Path, length: int, tested: int) -> None:
    """Write train.parquet and test.parquet, with captions, a second phrasing, and the class of the first object."""
    import pyarrow
    import pyarrow.parquet

    from vlightning.datamodules.drawn.labels import CLASSES
    from vlightning.datamodules.drawn.reinforced import captions_with_facts
    from vlightning.datamodules.drawn.shapes import ShapesTable

    for split in ("train", "test"):
        table = ShapesTable(split, length, tested, SIZE, 0)
        rows = []
        for row in range(len(table)):
            content, scene = io.BytesIO(), table.scene(row)
            table.image(row).save(content, "PNG")
            texts = list(captions_with_facts(scene))[:2]  # the caption, and the same from the other object
            names = {"caption": texts[0], "synthetic": texts[1:], "captions": texts}
            label = CLASSES.index(f"{scene.first.color} {scene.first.shape}")
            rows.append({"image": {"bytes": content.getvalue(), "path": None}, "label": label, **names})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    (folder / "classes.txt").write_text("\n".join(CLASSES))


def forked(work: Callable[[], None], output: Path) -> int:
    """Run in a forked process, whose output goes to a file; return its peak resident memory in MiB.

    Raises:
        SystemExit: If it fails.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process == 0:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            work()
        except SystemExit as stop:
            os._exit(1 if stop.code else 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"A run failed: see {output}")
    return usage.ru_maxrss // 1024


def fit(place: Path, words: list[str], steps: int, seed: int, every: int = 0) -> dict[str, float]:
    """Train from the beginning in `place`; return training samples per second, steps and peak memory in MiB.

    Args:
        place: folder of the run; whatever an interrupted run left there is removed.
        words: arguments of `vlightning fit`.
        steps: optimizer steps.
        seed: seed of the run.
        every: epochs between two validations; 0 for none.
    """
    shutil.rmtree(place, ignore_errors=True)
    own = [f"--seed_everything={seed}", f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1"]
    own += ["--trainer.accelerator=cpu", "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={place}"]
    own += ["--trainer.logger.name=", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    own += ["--trainer.callbacks+=SpeedMonitor", "--trainer.log_every_n_steps=10"]
    own += [f"--trainer.check_val_every_n_epoch={every}"] if every else ["--trainer.limit_val_batches=0"]
    peak = forked(lambda: vlightning(["fit", *words, *own]), place / "output.txt")
    with (place / "version_0/metrics.csv").open(newline="") as lines:
        found = [row.get("train/samples_per_second") for row in csv.DictReader(lines)]
    speed = statistics.harmonic_mean([float(value) for value in found if value])
    return {"pairs_per_second": speed, "steps": steps, "peak_mib": peak}


def checkpoint(place: Path) -> str:
    """Return the last checkpoint of a run."""
    return str(place / "version_0/checkpoints/last.ckpt")


class Comparison:
    """Runs of the comparison, with what they have in common.

    Args:
        folder: folder of data and runs.
        results: file of JSON lines.
        steps: steps of training on equally many pairs.
        seconds: seconds of training in runs of equal time.
        teacher_steps: steps of the larger CLIP, and of the auxiliary.
        classifier_epochs: epochs of SHRe's classifier, and of CoCoRD's teacher and students.
    """

    def __init__(
        self, folder: Path, results: Path, steps: int, seconds: float, teacher_steps: int, classifier_epochs: int
    ) -> None:
        self.folder, self.results, self.steps, self.seconds = folder, results, steps, seconds
        self.teacher_steps, self.classifier_epochs = teacher_steps, classifier_epochs
        self.teacher, self.learngene = folder / "teacher", folder / "learngene.safetensors"
        self.reinforced, self.runs = folder / "reinforced", folder / "runs"

    def done(self) -> list[dict[str, Any]]:
        """Return the finished runs."""
        return [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.exists() else []

    def once(self, kind: str, method: str, seed: int, work: Callable[[], dict[str, Any]]) -> None:
        """Do a run and append its line, unless it is there."""
        if any((line["kind"], line["method"], line["seed"]) == (kind, method, seed) for line in self.done()):
            return
        start = time.perf_counter()
        found = work()
        line = {"kind": kind, "method": method, "seed": seed, "wall": round(time.perf_counter() - start, 1), **found}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{kind}, {method}, seed {seed}: {line['wall']} s", flush=True)

    # ---- What methods need before they train ----

    def pairs(self, texts: list[str], captions: str = "caption") -> list[str]:
        """Return the arguments of the training data."""
        own = [
            "--data=ImageTextDataModule",
            f"--data.train={self.folder / 'train.parquet'}",
            "--data.augmentation=crop",
        ]
        own += ["--data.horizontal_flip=false", f"--data.image_size={SIZE}", f"--data.caption_column={captions}"]
        return [*own, f"--data.batch_size={BATCH}", "--data.num_workers=0", *texts]

    def train_teacher(self) -> dict[str, Any]:
        """Train the larger CLIP on both phrasings of the captions, and export it for open_clip."""
        place = self.runs / "teacher"
        words = ["--model=CLIPModule", f"--model.model={LARGER}", "--model.optim.learning_rate=1e-3"]
        found = fit(place, [*words, *self.pairs(CLIP_TEXTS, "captions")], self.teacher_steps, 0)
        shutil.rmtree(self.teacher, ignore_errors=True)
        export = ["export", checkpoint(place), str(self.teacher), "--layout=open_clip"]
        forked(lambda: vlightning(export), place / "output.txt")
        return found | self.tested(place)

    def reinforce(self) -> dict[str, Any]:
        """Embed three augmentations of each image and both phrasings by the larger CLIP."""
        shutil.rmtree(self.reinforced, ignore_errors=True)
        words = ["predict", "--model=ReinforcementModule", f'--model.teachers=[{{"weights": "{self.teacher}"}}]']
        words += ["--data=ReinforcementDataModule", f"--data.pairs={self.folder / 'train.parquet'}"]
        words += [f"--data.folder={self.reinforced}", "--data.synthetic_column=synthetic", "--data.augmentations=3"]
        words += [f"--data.image_size={SIZE}", "--data.batch_size=64", "--data.num_workers=0", "--data.num_ops=0"]
        words += ["--data.crop_scale=[0.9,1.0]", "--trainer.logger=false", "--trainer.accelerator=cpu"]
        words += ["--trainer.enable_progress_bar=false"]
        return {"peak_mib": forked(lambda: vlightning(words), self.runs / "reinforced.txt")}

    def extract(self) -> dict[str, Any]:
        """Train the auxiliary of 12 layers, taught by the larger CLIP, and write its learngene."""
        place = self.runs / "auxiliary"
        words = [*self.mmlg("MM-LG", 2 * LAYERS), f"--model.teacher.weights={self.teacher}"]
        found = fit(place, [*words, *self.pairs(CLIP_TEXTS, "captions")], self.teacher_steps, 0)
        export = ["export", checkpoint(place), str(self.learngene), "--layout=learngene"]
        self.learngene.unlink(missing_ok=True)
        forked(lambda: vlightning(export), place / "output.txt")
        return found | self.tested(place)

    def classifier(self) -> dict[str, Any]:
        """Train SHRe's teacher, by the quickstart's config."""
        return self.classes("shre/quickstart_teacher.yaml", [], self.runs / "classifier", 0)

    # ---- Trainings that are compared ----

    def mmlg(self, student: str, layers: int) -> list[str]:
        """Return the arguments of MM-LG's networks."""
        sizes = {"width": WIDTH, "heads": HEADS, "depth": layers, "embed_dim": EMBED}
        words = ["--model=MMLGModule", f"--model.student={student}", f"--model.vision.patch_size={PATCH}"]
        words += [f"--model.towers.{name}={value}" for name, value in sizes.items()]
        return [*words, "--model.optim.learning_rate=1e-3", "--model.optim.warmup_steps=50"]

    def words(self, method: str) -> list[str]:
        """Return the arguments of a method's training."""
        towers = [f"--model.vision.{name}={value}" for name, value in TOWERS.items()]
        match method:
            case "CLIP":
                own = ["--model=CLIPModule", f"--model.model={PLAIN}", "--model.optim.learning_rate=1e-3"]
                return [*own, *self.pairs(CLIP_TEXTS)]
            case "MobileCLIP":
                own = ["--model=MobileCLIPModule", f"--model.model={PLAIN}", "--model.momentum.momentum=null"]
                own.append("--model.teacher.distillation_weight=0.75")  # the paper's for its ViT
                own += ["--model.optim.learning_rate=1e-3", "--model.optim.warmup_steps=50"]
                own += ["--data=ReinforcedImageTextDataModule", f"--data.train={self.reinforced}"]
                own += [f"--data.image_size={SIZE}", f"--data.batch_size={BATCH}", "--data.num_workers=0"]
                own += [f"--data.image_mean={list(MEAN)}", f"--data.image_std={list(STD)}"]  # as all others
                return [*own, f"--data.max_tokens={TOKENS}"]
            case "MM-LG":
                start = {"file": str(self.learngene), "target": "student"}
                expansion = [{"class_path": "LearngeneExpansionCallback", "init_args": start}]
                own = [*self.mmlg("plain", LAYERS), "--model.teacher.distillation_weight=0"]
                return [*own, f"--trainer.callbacks={json.dumps(expansion)}", *self.pairs(CLIP_TEXTS)]
            case "ALBEF":
                text = {"width": WIDTH, "heads": HEADS, "ffn_width": 4 * WIDTH, "dropout": 0.0}
                text |= {"depth": LAYERS - FUSED, "fusion_depth": FUSED, "max_positions": TOKENS}
                own = [
                    "--model=ALBEFModule",
                    *towers,
                    *(f"--model.text.{name}={value}" for name, value in text.items()),
                ]
                own += [f"--model.contrast.embed_dim={EMBED}", "--model.contrast.queue_size=256"]
                own += ["--model.contrast.temperature_min=0.04", "--model.momentum.momentum=0.99"]
                own += ["--model.optim.learning_rate=1e-3", "--model.optim.warmup_steps=50"]
                return [*own, f"--model.rerank.k={RERANKED}", *self.pairs(OWN_TEXTS)]
            case "SHRe":
                own = ["--model=SHReModule", *towers, "--model.vision.post_norm=false", "--model.shared=transformer"]
                own += [f"--model.text.depth={LAYERS}", "--model.text.dropout=0", "--model.num_classes=40"]
                own += ["--model.teacher.name=resnet20", f"--model.teacher.weights={self.runs / 'classifier'}"]
                own += ["--model.teacher.mean=[0.5071,0.4867,0.4408]", "--model.teacher.std=[0.2675,0.2565,0.2761]"]
                return [*own, "--model.optim.learning_rate=1e-3", *self.pairs(OWN_TEXTS)]
        raise ValueError(method)

    def compared(self, method: str, seed: int, kind: str, steps: int) -> dict[str, Any]:
        """Train a method with a seed, test it, and measure what is used of it afterwards."""
        place = self.runs / f"{method}_{kind}_{seed}".replace(" ", "_")
        found = fit(place, self.words(method), steps, seed)
        return found | self.tested(place) | used(checkpoint(place), self.folder / "test.parquet", place)

    def tested(self, place: Path) -> dict[str, Any]:
        """Test a run: retrieval, and zero-shot classification of the first object."""
        start = time.perf_counter()
        labels = {"test": str(self.folder / "test.parquet"), "label_column": "label", "num_workers": 0}
        data = {"class_path": "ImageClassificationDataModule", "init_args": labels}
        given = {"data": data, "templates": ["a large {}", "a small {}"]}
        given["class_names"] = str(self.folder / "classes.txt")
        callback = [{"class_path": "ZeroShotClassification", "init_args": given}]
        words = ["test", f"--ckpt_path={checkpoint(place)}", f"--data.test={self.folder / 'test.parquet'}"]
        words.append("--data.caption_column=caption")
        words += [f"--trainer.callbacks={json.dumps(callback)}", "--trainer.logger=CSVLogger"]
        words += [f"--trainer.logger.save_dir={place}", "--trainer.logger.name=test"]
        forked(lambda: vlightning([*words, "--trainer.enable_progress_bar=false"]), place / "test.txt")
        (file,) = place.glob("test/version_*/metrics.json")
        return {"test_seconds": time.perf_counter() - start, "metrics": json.loads(file.read_text())["metrics"]}

    def classes(self, config: str, words: list[str], place: Path, seed: int) -> dict[str, Any]:
        """Train a classifier of single shapes; return its accuracy in validation."""
        epochs = self.classifier_epochs
        stops = [f"--model.optim.lr_milestones={[round(epochs * share) for share in (0.6, 0.8)]}"]
        own = ["--data.num_workers=0", "--checkpoint.monitor=val/top1", *stops, *words]
        steps = epochs * -(-4000 // 64)
        found = fit(place, [f"--config={CONFIGS / config}", *own], steps, seed, every=epochs)
        with (place / "version_0/metrics.csv").open(newline="") as lines:
            top1 = [float(row["val/top1"]) for row in csv.DictReader(lines) if row.get("val/top1")][-1]
        return found | {"metrics": {"val/top1": top1}}

    def student(self, row: str, seed: int) -> dict[str, Any]:
        """Train a student of CoCoRD's task."""
        words = [f"--config={CONFIGS / 'cocord' / name}" for name in STUDENTS[row]]
        if row != "labels":
            words.append(f"--model.teacher.weights={self.runs / 'cocord_teacher'}")
        place = self.runs / f"student_{row}_{seed}".replace(" ", "")
        return self.classes("cocord/quickstart.yaml", words, place, seed)

    def train_all(self, kind: str, seed: int) -> None:
        """Train every method with a seed, unless that is done."""
        speeds = {line["method"]: line["pairs_per_second"] for line in self.done() if is_first(line)}
        for method in METHODS:
            steps = self.steps if kind == EQUAL_SAMPLES else round(self.seconds * speeds[method] / BATCH)
            self.once(kind, method, seed, partial(self.compared, method, seed, kind, steps))

    def train_students(self, seed: int) -> None:
        """Train CoCoRD's teacher and every student with a seed, unless that is done."""
        place = self.runs / "cocord_teacher"
        teach = partial(self.classes, "cocord/quickstart_teacher.yaml", [], place, 0)
        self.once(BEFORE, "CoCoRD's teacher", 0, teach)
        for row in STUDENTS:
            self.once("students", row, seed, partial(self.student, row, seed))

    def run(self) -> None:
        """Do all missing runs, whole tables of the first seeds first."""
        self.once(BEFORE, "larger CLIP", 0, self.train_teacher)
        self.once(BEFORE, "reinforcement", 0, self.reinforce)
        self.once(BEFORE, "learngene", 0, self.extract)
        self.once(BEFORE, "classifier", 0, self.classifier)
        for seed in (0, 1, 2):
            self.train_all(EQUAL_SAMPLES, seed)
        self.train_all(EQUAL_TIME, 0)
        self.train_students(0)
        self.train_students(1)
        self.train_all(EQUAL_TIME, 1)
        self.train_students(2)


def is_first(line: dict[str, Any]) -> bool:
    """Return whether a run is of the first seed, with equally many pairs: its speed sets the steps of equal time."""
    return bool(line["kind"] == EQUAL_SAMPLES and line["seed"] == 0)


def used(trained: str, test: Path, place: Path) -> dict[str, Any]:
    """Return the parameters that embed a pair, and milliseconds for one image and for one text; medians."""
    found = place / "used.json"
    forked(lambda: found.write_text(json.dumps(_used(trained, test))), place / "output.txt")
    content: dict[str, Any] = json.loads(found.read_text())
    return content


def _used(trained: str, test: Path) -> dict[str, Any]:
    import pyarrow.parquet
    from PIL import Image

    from vlightning.commands.evaluate.model import load_model

    model = load_model(trained)
    row = pyarrow.parquet.read_table(test).slice(0, 1).to_pylist()[0]
    image = model.transform(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB"))[None]
    calls = {"image": lambda: model.encode_images(image), "text": lambda: model.encode_texts([row["caption"]])}
    times = {name: 1000 * statistics.median(seconds(call) for _ in range(60)) for name, call in calls.items()}
    network: Any = model.network
    more = 0
    reached = touched(network, list(calls.values()))
    if hasattr(network, "match_scores"):
        tokens = torch.zeros(1, (SIZE // PATCH) ** 2 + 1, WIDTH)
        states, mask = torch.zeros(RERANKED, TOKENS, WIDTH), torch.ones(RERANKED, TOKENS, dtype=torch.long)
        match = torch.no_grad()(partial(network.match_scores, states, mask, tokens))
        times["rerank"] = 1000 * statistics.median(seconds(match) for _ in range(60))
        more = sum(count for name, count in touched(network, [match]).items() if name not in reached)
    words = sum(count for name, count in reached.items() if "token_embedding" in name or "word_embeddings" in name)
    return {
        "latency_ms": times,
        "parameters": sum(reached.values()),
        "word_parameters": words,
        "rerank_parameters": more,
    }


def touched(network: torch.nn.Module, calls: list[Callable[[], Any]]) -> dict[str, int]:
    """Return the number of parameters, by name, of each module that runs in calls."""
    ran: set[torch.nn.Module] = set()
    hooks = [module.register_forward_hook(lambda module, *_: ran.add(module)) for module in network.modules()]
    for call in calls:
        call()
    for hook in hooks:
        hook.remove()
    return {
        f"{prefix}.{name}": parameter.numel()
        for prefix, module in network.named_modules()
        if module in ran
        # Attention computes with the weights of its projection, without a call of that module.
        for name, parameter in module.named_parameters(recurse=isinstance(module, torch.nn.MultiheadAttention))
    }


def main() -> None:
    """Do all missing runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of data and runs")
    parser.add_argument("results", type=Path, help="file of JSON lines")
    parser.add_argument("--length", type=int, default=6_400, help="training images")
    parser.add_argument("--tested", type=int, default=1_000, help="test images")
    parser.add_argument("--steps", type=int, default=540, help="steps of 64 pairs, on equally many pairs")
    parser.add_argument("--seconds", type=float, default=90, help="seconds of training, for equally many seconds")
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--classifier-epochs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    callbacks.load_all()
    lightning_modules.load_all()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "classes.txt").is_file():
        write_pairs(folder, options.length, options.tested)
    add_clip(folder, PLAIN, WIDTH)
    add_clip(folder, LARGER, 2 * WIDTH)
    own = options.steps, options.seconds, options.teacher_steps, options.classifier_epochs
    Comparison(folder, options.results.resolve(), *own).run()


if __name__ == "__main__":
    main()
