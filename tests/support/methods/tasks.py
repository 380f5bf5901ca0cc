"""Small modules of ALBEF's downstream tasks, data of drawn shapes, and random batches for them."""

import torch

from support.methods.albef import IMAGE_SIZE, MAX_TOKENS, SIZES, random_batch
from support.methods.groups import merged
from vlightning.datamodules import (
    ShapesDataModule,
    ShapesEntailmentDataModule,
    ShapesNLVR2DataModule,
)
from vlightning.lightning_modules import EntailmentModule, NLVR2Module, TextAssignmentModule


class Training(ShapesDataModule):
    """Shapes without a validation split, for a method without an evaluation."""

    def val_dataloader(self):
        return []


KINDS = {"entailment": EntailmentModule, "nlvr": NLVR2Module, "assignment": TextAssignmentModule}
DATA = {"entailment": ShapesEntailmentDataModule, "nlvr": ShapesNLVR2DataModule, "assignment": Training}


def tiny_task(name, seed=0, changes=None, **more):
    torch.manual_seed(seed)
    sizes = {group: SIZES[group] for group in ("vision", "text", "optim")}
    if name == "assignment":
        more = {"embed_dim": SIZES["contrast"]["embed_dim"]} | more
    return KINDS[name](**merged(sizes, more, changes or {}))


def task_and_data(name, seed, changes=None, **data):
    """A module with a dropout, and shapes for it."""
    words = {"vocab_size": 200, "max_tokens": MAX_TOKENS, "image_size": IMAGE_SIZE}
    module = tiny_task(name, seed, changes, text={"vocab_size": 200}, memory={"micro_batch_size": 3})
    return module, DATA[name](**words | {"length": 32, "eval_length": 10} | data)


def random_task_batch(name, size, seed=0, dtype=torch.float32):
    batch = random_batch(size, seed, dtype=dtype)
    if name == "assignment":
        return batch
    generator = torch.Generator().manual_seed(seed + 1)
    batch["label"] = torch.randint(2, (size,), generator=generator)
    if name == "nlvr":
        batch["image_left"] = batch.pop("image")
        batch["image_right"] = torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator).to(dtype)
    return batch
