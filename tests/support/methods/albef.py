"""A small ALBEF and batches for it."""

from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from support.methods.groups import merged
from vlightning.common.preprocessing import Preprocessing
from vlightning.common.tokenizers import tokenizer_from_json
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.official import from_official, is_flat, official_name
from vlightning.lightning_modules.albef.weights import load_state
from vlightning.lightning_modules.base.model_card import Training

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


def write_albef(folder, texts, seed=3):
    """Write the export of an ALBEF with random weights.

    Args:
        folder: of the export.
        texts: folder with the tokenizer.
        seed: of the weights.
    """
    module = tiny_albef(seed, text={"vocab_size": 200})
    text = tokenizer_from_json((Path(texts) / "tokenizer.json").read_text()).backend_tokenizer.to_str()
    module.adopt_preprocessing(Preprocessing(IMAGE_SIZE, (0.5,) * 3, (0.5,) * 3, "bicubic").as_dict())
    module.save_pretrained(folder, text, Training({"max_tokens": MAX_TOKENS}))


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
