"""A small module of every method, and random batches for it (with a datamodule: `support.methods`)."""

import torch
from torch.utils.data import DataLoader, Dataset

from support import albef, clip, cocord, mmlg, shre

BUILT = {
    "albef": lambda folder, changes: albef.tiny_albef(changes=changes, contrast={"queue_size": 24}),
    "cocord": lambda folder, changes: cocord.tiny_cocord(folder, **changes),
    "mmlg": lambda folder, changes: mmlg.tiny_extraction(mmlg.write_teacher(folder / "teacher.safetensors"), **changes),
    "mobileclip": lambda folder, changes: clip.tiny_module(**changes),
    "shre": lambda folder, changes: shre.tiny_shre(folder, **changes),
}
NAMES = tuple(BUILT)
BATCHES = {
    "albef": albef.random_batch,
    "cocord": cocord.random_batch,
    "mmlg": clip.reinforced_batch,
    "mobileclip": clip.reinforced_batch,
    "shre": shre.random_batch,
}


class Rows(Dataset):
    """Rows of a batch."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["image"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.batch.items()}


def small(name, folder, **changes):
    """A module in float32, that a Trainer can fit."""
    module = BUILT[name](folder, changes)
    for spoken in ("log", "log_dict"):  # some come without, for calls without a Trainer
        vars(module).pop(spoken, None)
    return module


def random_rows(name, size):
    """A batch in float32."""
    return BATCHES[name](size, dtype=torch.float32)


def rows_loader(name, size, batch_size):
    return DataLoader(Rows(random_rows(name, size)), batch_size=batch_size, drop_last=True)
