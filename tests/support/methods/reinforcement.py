"""A module that embeds without a network, and a script that reinforces pairs and can kill itself.

python reinforcement.py FOLDER PAIRS [--kill batch|index|rename]
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value
from lightning import Callback, LightningModule, Trainer

from support.data.images import draw_image, encoded
from vlightning.callbacks import LeftOut, Reinforced, ReinforcementWriter
from vlightning.datamodules import ReinforcementDataModule

ROWS, SHARD = 10, 4
IMAGE = {"bytes": Value("binary"), "path": Value("string")}


def write_pairs(path, count=ROWS, replaced=None):
    """Write pairs with synthetic captions, some of them replaced, and return the path."""
    rows = [
        {
            "image": {"bytes": encoded(draw_image(number), "JPEG", quality=90), "path": None},
            "caption": f"image number {number}",
            "made": [f"first of {number}", f"second of {number}"],
        }
        | (replaced or {}).get(number, {})
        for number in range(count)
    ]
    features = Features({"image": IMAGE, "caption": Value("string"), "made": List(Value("string"))})
    Dataset.from_list(rows, features=features).to_parquet(path)
    return str(path)


def reinforcement_data(pairs, folder, **options):
    defaults = {"synthetic_column": "made", "augmentations": 3, "shard_size": SHARD, "batch_size": 3, "image_size": 16}
    more = {"num_workers": 0, "seed": 5, "max_bad_share": 1.0, "cache_dir": str(Path(folder).parent / "cache")}
    return ReinforcementDataModule(pairs, str(folder), **{**defaults, **more, **options})


class Embeds(LightningModule):
    """Two teachers of 4 and 6 dimensions that embed the colors of a crop and the letters of a text.

    Args:
        turned: distance of the embeddings from those of an earlier run.
        weights: name in the manifest.
        leaves_out: rows that are left out.
    """

    widths = (4, 6)
    captions = None
    views = ((16, "bicubic"),)
    caption_transform = None

    def __init__(self, turned=0.0, weights="one", leaves_out=()):
        super().__init__()
        self.turned = turned
        self.weights = weights
        self.leaves_out = leaves_out
        self.steps = 0

    def settings(self):
        return {"teachers": [{"weights": self.weights, "width": width} for width in self.widths], "captioner": None}

    def predict_step(self, batch, batch_idx):
        self.steps += 1
        originals = batch["originals"]
        left = [LeftOut(row, *fault) for row, fault in originals.faults]
        records = {}
        for number, pair in enumerate(originals.pairs):
            if pair.row in self.leaves_out:
                left.append(LeftOut(pair.row, "embedding not finite", pair.name))
                continue
            image = batch["views"][0][number].float().flatten(1)[:, 7::70][:, :10] / 255
            text = torch.tensor([list(text.encode())[:10] for text in (pair.caption, *pair.synthetic)]) / 255
            image, text = image + 0.1, text + self.turned * torch.arange(10)
            records[pair.row] = pair.reinforced(pair.synthetic, unit(image), unit(text[:1]), unit(text[1:]))
        return Reinforced(records, left)


def unit(rows):
    return torch.cat([torch.nn.functional.normalize(part, dim=1) for part in rows.split((4, 6), 1)], 1)


def predict(pairs, folder, module=None, writer=None, trainer=None, callbacks=(), **options):
    """Reinforce pairs and return the module."""
    module, data = module or Embeds(), reinforcement_data(pairs, folder, **options)
    if trainer is None:
        writer = writer or ReinforcementWriter(4)
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[writer, *callbacks])
    trainer.predict(module, data)
    return module


class KillsInBatch(Callback):
    """Kill the process before the fourth batch, when the first shard is written and the second started."""

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 3:
            folder = trainer.datamodule.folder
            while not (folder / "00000000.tar").is_file() or not list(folder.glob(".incomplete-*")):
                time.sleep(0.01)  # for the writing thread
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at_rename(ending):
    """Kill the process where the second shard, or its index, would be renamed."""
    replace = os.replace

    def killing(source, target):
        if str(target).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = killing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("pairs")
    parser.add_argument("--kill")
    args = parser.parse_args()
    if args.kill in ("index", "rename"):
        kill_at_rename("00000001.index.json" if args.kill == "index" else "00000001.tar")
    predict(args.pairs, args.folder, callbacks=[KillsInBatch()] if args.kill == "batch" else [])


if __name__ == "__main__":
    main()
