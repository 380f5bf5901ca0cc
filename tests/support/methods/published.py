"""A small open_clip model in its folder, and fine-tunings of it."""

import torch

from vlightning.common.preprocessing import Preprocessing
from vlightning.lightning_modules import CLIPModule
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.shapes import OpenClipConfig

LENGTH, SIZE, WORDS = 8, 32, 49408
CONFIG = OpenClipConfig(
    "published",
    {
        "embed_dim": 16,
        "vision_cfg": {"layers": 3, "width": 32, "head_width": 16, "patch_size": 16, "image_size": SIZE},
        "text_cfg": {"context_length": LENGTH, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 2},
    },
)
PREPROCESSING = Preprocessing(SIZE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), "bicubic")


def write_published(folder, seed=7):
    """Write the folder of a model with weights of a seed, and return its path."""
    torch.manual_seed(seed)
    save_open_clip(build_model(CONFIG, context_length=LENGTH), CONFIG, PREPROCESSING, folder)
    return str(folder)


def tiny_clip(seed=0, **options):
    torch.manual_seed(seed)
    model = {} if "weights" in options else {"model": CONFIG}
    module = CLIPModule(**{"max_tokens": LENGTH} | model | options)
    module.log = module.log_dict = lambda *_, **__: None
    return module


def pairs(rows, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS - 1, (rows, LENGTH), generator=generator)
    ids[:, -1] = WORDS - 1
    return {
        "image": torch.rand(rows, 3, SIZE, SIZE, generator=generator, dtype=dtype),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_id": torch.arange(rows),
    }
