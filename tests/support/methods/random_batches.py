"""A small module of every method, and random batches for it (with a datamodule: `support.methods.methods`)."""

from importlib import import_module

import torch
from torch.utils.data import DataLoader, Dataset

NAMES = ("albef", "cocord", "mmlg", "mobileclip", "shre")


class Rows(Dataset):
    """Rows of a batch."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["image"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.batch.items()}


def _helpers(name):
    """The helpers of a method; only MobileCLIP's and MM-LG's import open_clip."""
    return import_module(f"support.methods.{'clip' if name == 'mobileclip' else name}")


def _built(name, folder, changes):
    helpers = _helpers(name)
    if name == "albef":
        return helpers.tiny_albef(changes=changes, contrast={"queue_size": 24})
    if name == "mmlg":
        return helpers.tiny_extraction(helpers.write_teacher(folder / "teacher.safetensors"), **changes)
    if name == "mobileclip":
        return helpers.tiny_module(**changes)
    return getattr(helpers, f"tiny_{name}")(folder, **changes)


def small(name, folder, **changes):
    """A module in float32, that a Trainer can fit."""
    module = _built(name, folder, changes)
    for spoken in ("log", "log_dict"):  # some come without, for calls without a Trainer
        vars(module).pop(spoken, None)
    return module


def random_rows(name, size):
    """A batch in float32."""
    make = "reinforced_batch" if name in ("mmlg", "mobileclip") else "random_batch"
    return getattr(_helpers("mobileclip" if name == "mmlg" else name), make)(size, dtype=torch.float32)


def rows_loader(name, size, batch_size):
    return DataLoader(Rows(random_rows(name, size)), batch_size=batch_size, drop_last=True)
