"""Reinforced training against plain CLIP training of the same student on the same shards.

    python benchmarks/mobileclip_step.py                      # the reader, then the step
    python benchmarks/mobileclip_step.py --only reader
    python benchmarks/mobileclip_step.py --only step --model MobileCLIP-S1 --batch 32

The shards hold drawn images of about 500 x 375 with DataCompDR's reinforcements: 30 augmentations, 5 synthetic
captions, embeddings of two teachers 768 wide each.

**reader**: pairs a second of one process without workers. "Plain" reads image and caption of the same shards; it
augments either by a random resized crop alone, as CLIP does, or by that and RandAugment, which are the augmentations
that a reinforced sample replays. Embeddings come in three forms: `npz` as the project writes it, `npz` with compression
as the vendor's writer does, and `pth.gz`.

**step**: forward, backward, optimizer and moving average on a batch in memory. A reinforced step encodes two captions
for each image, a plain step one; the second pass through the text tower is timed separately and subtracted.

Times are medians of interleaved calls.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader import draw_images, read_rows
from timing import PRECISIONS, autocast, medians
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from vlightning.callbacks import EMACallback
from vlightning.datamodules import ImageTextDataModule, ReinforcedImageTextDataModule
from vlightning.datamodules.reinforced.writer import ReinforcedRecord, write_shard
from vlightning.datamodules.transforms.replay import AugmentationDraw
from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.optim.optimizers import channels_last

WIDTH, AUGMENTATIONS, SYNTHETIC = 1536, 30, 5
FORMS = ("npz", "npz, compressed", "pth.gz")


def write_shards(folder: Path, count: int) -> dict[str, str]:
    """Write shards of the same samples with embeddings in each form, and return their folders."""
    files, _ = draw_images(folder, count)
    draw = AugmentationDraw()
    records = []
    torch.manual_seed(0)
    for number, (image, captions) in enumerate(read_rows(files)):
        data = Path(str(image)).read_bytes()
        records.append(
            ReinforcedRecord(
                key=f"{number:08d}",
                image=data,
                suffix="jpg",
                caption=captions[0],
                synthetic={"syn_text": [f"{captions[1]} {place}" for place in range(SYNTHETIC)]},
                augmentations=[draw(325, 450) for _ in range(AUGMENTATIONS)],
                size=None,
                image_embeddings=_unit(AUGMENTATIONS),
                text_embeddings=_unit(1),
                synthetic_embeddings={"syn_text": _unit(SYNTHETIC)},
            )
        )
    folders = {form: str(folder / form) for form in FORMS}
    write_shard(Path(folders["npz"]) / "00000000.tar", records)
    write_shard(Path(folders["pth.gz"]) / "00000000.tar", records, embeddings="pth.gz")
    stored, np.savez = np.savez, np.savez_compressed
    try:
        write_shard(Path(folders["npz, compressed"]) / "00000000.tar", records)
    finally:
        np.savez = stored
    return folders


def _unit(rows: int) -> Tensor:
    return nn.functional.normalize(torch.randn(rows, WIDTH), dim=-1)


def reader(options: argparse.Namespace) -> None:
    """Print the reader's table."""
    with tempfile.TemporaryDirectory() as name:
        folders = write_shards(Path(name), options.images)
        common = {"batch_size": options.images, "num_workers": 0, "seed": 0, "cache_dir": str(Path(name) / "cache")}

        def passes(data: Any) -> Callable[[], None]:
            data.prepare_data()
            data.setup("fit")
            loader = data.train_dataloader()

            def read() -> None:
                (_,) = loader  # an epoch is one batch

            return read

        crop = v2.RandomResizedCrop(options.size, interpolation=InterpolationMode.BILINEAR)
        tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        transforms = {
            "plain, crop": v2.Compose([crop, *tensor]),
            "plain, crop and RandAugment": v2.Compose([crop, v2.RandAugment(), *tensor]),
        }
        clip = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": 77, "caption_column": "txt"}
        functions: dict[str, Callable[[], Any]] = {
            way: passes(ImageTextDataModule(train=folders["npz"], train_transform=transform, **common, **clip))
            for way, transform in transforms.items()
        }
        for form, folder in folders.items():
            data = ReinforcedImageTextDataModule(folder, image_size=options.size, **common)
            functions[f"reinforced, {form}"] = passes(data)
        measured = medians(functions, options.repeats)
    print(f"reader, {options.size} px, one thread, medians of {options.repeats} passes over {options.images} pairs")
    print(f"{'':32} {'pairs/s':>8} {'of plain':>9} {'of the same augmentations':>26}")
    for way, taken in measured.items():
        ratios = (measured[plain] / taken for plain in transforms)
        cells = " ".join(f"{ratio:{width}.2f}" for ratio, width in zip(ratios, (9, 26), strict=True))
        print(f"{way:32} {options.images / taken:8.1f} {cells}")


class Step:
    """A module with its optimizer and average, which takes steps as the Trainer does."""

    def __init__(self, options: argparse.Namespace, reinforced: bool) -> None:
        torch.manual_seed(0)
        self.module = MobileCLIPModule(
            options.model,
            vision={"image_size": options.size},
            teacher={"distillation_weight": float(reinforced)},
        )
        channels_last(self.module)  # as `configure_model` does
        self.module.log = lambda *_, **__: None  # type: ignore[method-assign]
        self.ema = EMACallback(self.module.momentum_pairs(), log=False)
        optimizers: Any = self.module.configure_optimizers()
        self.optimizer = optimizers["optimizer"]

    def __call__(self, batch: dict[str, Tensor], precision: str) -> None:
        """Run forward and backward pass, optimizer and average."""
        self.optimizer.zero_grad()
        with autocast(precision):
            loss = self.module.training_step(batch, 0)
        loss.backward()
        self.optimizer.step()
        self.ema.update(self.module)


def step(options: argparse.Namespace) -> None:
    """Print the step's table."""
    size = options.size
    texts = [torch.randint(1, 49406, (options.batch, 77)) for _ in range(2)]
    for ids in texts:
        ids[:, 20] = 49407
    plain = {"image": torch.rand(options.batch, 3, size, size), "input_ids": texts[0]}
    teachers = {f"teacher_{name}": _unit(options.batch) for name in ("image", "text", "synthetic")}
    batch = plain | {"synthetic_input_ids": texts[1]} | teachers
    steps = {"plain": (Step(options, False), plain), "reinforced": (Step(options, True), batch)}
    rows = []
    for precision in PRECISIONS:
        student = steps["plain"][0].module.student

        def encode(ids: Tensor, precision: str = precision, student: Any = student) -> None:
            student.zero_grad()
            with autocast(precision):
                features = student.encode_text(ids)
            features.float().sum().backward()

        functions: dict[str, Callable[[], Any]] = {
            "one caption": lambda encode=encode: encode(texts[0]),
            "two captions": lambda encode=encode: encode(torch.cat(texts)),
        }
        for way, (run, data) in steps.items():
            functions[way] = lambda run=run, data=data, precision=precision: run(data, precision)
        found = medians(functions, options.repeats)
        second = found["two captions"] - found["one caption"]
        rows.append(
            {
                "precision": precision,
                "plain": options.batch / found["plain"],
                "reinforced": options.batch / found["reinforced"],
                "ratio": found["plain"] / found["reinforced"],
                "second text pass, s": second,
                "ratio without it": found["plain"] / (found["reinforced"] - second),
            }
        )
    print(f"step, {options.model}, {size} px, {options.batch} pairs, {torch.get_num_threads()} threads; pairs/s")
    print(" ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:20.3f}" if isinstance(value, float) else f"{value:>20}" for value in row.values()))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("reader", "step"))
    parser.add_argument("--model", default="MobileCLIP-S0")
    parser.add_argument("--size", type=int, default=256, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=16, help="pairs in a step")
    parser.add_argument("--images", type=int, default=256, help="pairs that the reader reads in a pass")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}; {json.dumps(vars(options))}")
    if options.only != "step":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        reader(options)
        torch.set_num_threads(threads)
    if options.only != "reader":
        step(options)


if __name__ == "__main__":
    main()
