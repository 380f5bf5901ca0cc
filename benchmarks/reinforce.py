r"""Dataset reinforcement by stage, and the share of the teachers' own forward passes in its time.

    python benchmarks/reinforce.py --samples 32 --augmentations 5

The whole runs as `vlightning predict` does: images are decoded and augmented in workers, embedded by the teachers,
encoded and written in a thread. The baseline is the time of the same teachers for as many images and texts in memory.
Networks have random weights, images are synthetic (500 x 375, JPEG); captions are in a column, and the captioner is
timed separately.
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from datasets import Dataset, Features, List, Value
from lightning.pytorch import Callback, Trainer
from PIL import Image
from safetensors.torch import save_file
from timing import autocast, medians, seconds
from typing_extensions import override

from vlightning.callbacks import ReinforcementWriter
from vlightning.datamodules import ReinforcementDataModule
from vlightning.lightning_modules import CoCaCaptioner, ReinforcementModule
from vlightning.lightning_modules.mobileclip import Teacher

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
COLUMNS = Features(
    {
        "image": {"bytes": Value("binary"), "path": Value("string")},
        "caption": Value("string"),
        "made": List(Value("string")),
    }
)


def write_pairs(path: Path, samples: int, captions: int) -> None:
    """Write images with some detail, and captions."""
    rows = []
    for number in range(samples):
        draws = np.random.default_rng(number)
        small = Image.fromarray(draws.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        content = io.BytesIO()
        small.resize((500, 375), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
        made = [f"caption {place} of image number {number}" for place in range(captions)]
        image = {"bytes": content.getvalue(), "path": None}
        rows.append({"image": image, "caption": f"an image of number {number}", "made": made})
    Dataset.from_list(rows, features=COLUMNS).to_parquet(path)


def write_model(name: str, folder: Path, seed: int) -> None:
    """Write a folder that open_clip loads, with random weights."""
    torch.manual_seed(seed)
    folder.mkdir()
    network = open_clip.create_model(name)
    # open_clip leaves a captioner's last projection uninitialized. The scale makes next tokens as uneven as after
    # training.
    state = network.state_dict()
    if "text_decoder.text_projection" in state:
        last = state["text_decoder.text_projection"]
        last.copy_(6 * len(last) ** -0.5 * torch.randn(last.shape))
    save_file({key: value.contiguous().clone() for key, value in state.items()}, folder / "open_clip_model.safetensors")
    config = {
        "model_cfg": open_clip.get_model_config(name),
        "preprocess_cfg": open_clip.get_model_preprocess_cfg(network),
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))


class Clock(Callback):
    """Wall time between the first batch and the last shard, without loading models."""

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.start = time.perf_counter()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.taken = time.perf_counter() - self.start


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", nargs="+", default=["ViT-B-16-quickgelu", "ViT-B-16"])
    parser.add_argument("--captioner", default="coca_ViT-B-32")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--augmentations", type=int, default=5)
    parser.add_argument("--captions", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_pairs(folder / "pairs.parquet", options.samples, options.captions)
        for number, name in enumerate(options.teachers):
            write_model(name, folder / f"teacher{number}", number)
        write_model(options.captioner, folder / "captioner", 99)
        measure(folder, options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Measure the stages and the complete run, and print them."""
    teachers = [Teacher(str(folder / f"teacher{number}")) for number in range(len(options.teachers))]

    def data(name: str, captioned: bool = False) -> ReinforcementDataModule:
        return ReinforcementDataModule(
            str(folder / "pairs.parquet"),
            str(folder / name),
            synthetic_column=None if captioned else "made",
            augmentations=options.augmentations,
            embeddings="pth.gz",
            batch_size=options.batch_size,
            num_workers=options.workers,
            shard_size=max(options.samples // 2, 1),
            cache_dir=str(folder / "cache"),
        )

    def reinforce(name: str) -> float:
        module, clock = ReinforcementModule(teachers), Clock()
        trainer = Trainer(
            accelerator="cpu",
            precision=options.precision,
            logger=False,
            enable_progress_bar=False,
            callbacks=[ReinforcementWriter(0), clock],  # the clock comes last, to include the writing thread
        )
        trainer.predict(module, data(name))
        return clock.taken

    module = ReinforcementModule(teachers)
    module.load()
    dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32
    module.ensemble.networks.to(dtype)
    source = data("none")
    source.prepare_data()
    source.setup("predict")
    source.num_workers = 0
    start = time.perf_counter()
    batches = list(source.predict_dataloader())
    loading = time.perf_counter() - start

    pairs = [pair for batch in batches for pair in batch["originals"].pairs]
    texts = [text for pair in pairs for text in (pair.caption, *pair.synthetic)]
    size = module.ensemble.loaded[0].preprocessing.image_size
    ready = torch.randn(options.batch_size * options.augmentations, 3, size, size, dtype=dtype)
    some = texts[: len(texts) * options.batch_size // options.samples]
    tokens = [teacher.tokenizer(some) for teacher in module.ensemble.loaded]

    @torch.inference_mode()
    def floor() -> None:
        with autocast(options.precision):
            for teacher, ids in zip(module.ensemble.loaded, tokens, strict=True):
                for part in ready.split(module.ensemble.forward_batch):
                    teacher.network.encode_image(part)
                teacher.network.encode_text(ids)

    each = options.samples / options.batch_size
    wall: list[float] = []
    floors: list[float] = []
    reinforce("warm-up")
    for repeat in range(options.repeats):  # interleaved
        floors.append(seconds(floor) * each)
        wall.append(reinforce(f"run{repeat}"))
    whole, least = float(np.median(wall)), float(np.median(floors))

    width = sum(module.widths)
    image, text = torch.randn(options.augmentations, width), torch.randn(1 + options.captions, width)

    def write() -> None:
        with source.open_shard(0) as shard:
            for pair in pairs:
                record = pair.reinforced(pair.synthetic, image, text[:1], text[1:])
                shard.add(record.key, record.members(source.version, source.embeddings))

    captioner = CoCaCaptioner(weights=str(folder / "captioner"), captions=options.captions)
    captioner.load()
    captioner.to(dtype)
    images = torch.randn(options.batch_size, 3, 224, 224, dtype=dtype)

    @torch.inference_mode()
    def caption() -> None:
        with autocast(options.precision):
            captioner(images, list(range(len(images))))

    other = medians({"write": write, "caption": caption}, 1)
    print(
        f"{' + '.join(options.teachers)}, {options.augmentations} augmentations, {options.captions} captions, ", end=""
    )
    print(f"{options.precision}, {torch.get_num_threads()} threads, {options.workers} worker(s); samples/s")
    print(f"  decode and augment, one process   {options.samples / loading:8.2f}")
    print(f"  captioner {options.captioner:24}{options.batch_size / other['caption']:8.2f}")
    print(f"  encode and write, one thread      {options.samples / other['write']:8.2f}")
    print(f"  teachers alone                    {options.samples / least:8.2f}")
    print(f"  the whole, captions from a column {options.samples / whole:8.2f}")
    print(f"share of the teachers' own passes in the time of the whole: {least / whole:.2f}")


if __name__ == "__main__":
    main()
