"""A small ALBEF and batches for it."""

from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from support.methods.groups import merged
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.official import from_official, is_flat, official_name
from vlightning.lightning_modules.albef.weights import load_state

SIZES = {
    "vision": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2},
    "text": {
        "vocab_size": 120,
        "max_positions": 16,
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "depth": 1,
        "fusion_depth": 1,
    },
    "contrast": {"embed_dim": 8, "queue_size": 16},
    "optim": {"warmup_steps": 4, "learning_rate": 1e-3},
}
IMAGE_SIZE, MAX_TOKENS = 16, 16


def tiny_albef(seed=0, changes=None, kind=ALBEFModule, **more):
    torch.manual_seed(seed)
    return kind(**merged(SIZES, more, changes or {}))


def load_official(module, official):
    """Load a state dict in the authors' layout, with its queues, and return the log line."""
    name_in_source = partial(official_name, flat=is_flat(official))
    return load_state(module, from_official(official), "a state dict of the authors", True, name_in_source)


def random_batch(size, seed=0, length=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(104, 120, (size, length), generator=generator)
    input_ids[:, 0] = 101
    lengths = torch.randint(3, length + 1, (size,), generator=generator)
    attention_mask = (torch.arange(length) < lengths[:, None]).long()
    return {
        "image": torch.randn(size, 3, 16, 16, generator=generator).to(dtype),
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "image_id": torch.arange(size),
        "sample_index": torch.arange(size),
    }


class RandomPairs(Dataset):
    """Rows of one `random_batch`."""

    def __init__(self, size):
        self.rows = random_batch(size)

    def __len__(self):
        return len(self.rows["image_id"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.rows.items()}


def pairs_loader(size, batch_size):
    return DataLoader(RandomPairs(size), batch_size=batch_size, drop_last=True)
