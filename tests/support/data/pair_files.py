"""Pairs in files with unusable images, and a datamodule that is set up."""

import io

import lightning.pytorch as pl
import numpy as np
from PIL import Image

from support.data.images import encoded


def bomb():
    buffer = io.BytesIO()
    Image.new("1", (1200, 1200)).save(buffer, "PNG")
    return buffer.getvalue()


def bad_files():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8))
    return {
        "truncated": encoded(noise, "JPEG")[:1000],
        "not an image": b"<html>404 not found</html>",
        "too large": bomb(),
        "missing file": None,
    }


def items(files, count, bad=(), empty=()):
    paths = files.images(count)
    causes = bad_files()
    for number, cause in bad:
        path = files.folder / paths[number]
        path.unlink()
        if causes[cause] is not None:
            path.write_bytes(causes[cause])
    return [
        {"image": path, "caption": " " if number in empty else f"image number {number}"}
        for number, path in enumerate(paths)
    ]


def opened(module, stage="fit", **options):
    data = module(**options)
    data.prepare_data()
    data.setup(stage)
    return data


class Predictor(pl.LightningModule):
    """Returns what it was fed, and tells a writer which items that was."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {name: value.tolist() for name, value in batch.items() if name != "image"}


class Items(pl.callbacks.BasePredictionWriter):
    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.found = batch_indices


def predicted(folder, data, ckpt_path=None):
    items = Items("epoch")
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[items],
    )
    return trainer.predict(Predictor(), datamodule=data, ckpt_path=ckpt_path), items.found
