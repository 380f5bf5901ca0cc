"""A SHRe small enough for float64, its teacher's file, and batches for it."""

import timm
import torch

from support.methods.cocord import teacher_file
from support.methods.groups import in_groups, merged
from vlightning.lightning_modules import SHReModule

CLASSES = 5
SIZES = {
    "num_classes": CLASSES,
    "vision": {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2},
    "text": {"depth": 2, "max_tokens": 8, "vocab_size": 120, "dropout": 0.0},
}
WORDS = {"text": {"vocab_size": 320}}
"""For captions of `ShapesDataModule`."""
EMBEDDING = 64
SELF_SUPERVISED = {
    "num_classes": EMBEDDING,
    "shared": "s_smke",
    "teacher": {
        "target": "embedding",
        "name": "timm/test_vit",
        "weights": None,  # for images of 160 pixels
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "kl": {"weight": 1.0},
}


def write_self_supervised(folder):
    """The arguments of a module with a self-supervised teacher, whose file is written."""
    torch.manual_seed(1)
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), folder / "test_vit.pth")
    return merged(SELF_SUPERVISED, {"teacher": {"weights": str(folder / "test_vit.pth")}})


def write_teacher(folder, classes=CLASSES, seed=1):
    """The arguments of a module with a teacher, whose file is written."""
    return {
        "num_classes": classes,
        "teacher": {"name": "resnet8", "weights": teacher_file(folder, "resnet8", classes, seed)},
        "kl": {"weight": 1.0},
    }


def tiny_shre(folder=None, seed=0, **options):
    """It has a teacher where a folder for the file is given."""
    taught = {"kl": {"weight": 0.0}} if folder is None else write_teacher(folder)
    torch.manual_seed(seed)
    return SHReModule(**merged(SIZES, taught, in_groups(SHReModule, options)))


def ready(module):
    """With its teacher, in float64, and without a Trainer to log to."""
    module.setup("fit")
    module.log = module.log_dict = lambda *_, **__: None
    return module.double()


def random_batch(size=6, seed=0, length=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(104, 120, (size, length), generator=generator)
    input_ids[:, 0] = 101
    lengths = torch.randint(3, length + 1, (size,), generator=generator)
    attention_mask = (torch.arange(length) < lengths[:, None]).long()
    return {
        "image": torch.randn(size, 3, 16, 16, generator=generator, dtype=dtype),
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "image_id": torch.arange(size),
        "sample_index": torch.arange(size),
    }
