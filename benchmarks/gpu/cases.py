"""The methods at the sizes of their papers, or at toy sizes, with random weights and batches in memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from setting import Setting, has
from torch import Tensor

Batch = dict[str, Tensor]


class Case(NamedTuple):
    """A method to measure."""

    build: Callable[[Path, bool], LightningModule]
    """From a folder for teachers' files, and whether at toy sizes."""
    batch: Callable[[int, bool], Batch]
    """From the number of images, and whether at toy sizes."""
    images: int
    """Images of a batch at full size."""
    package: str = "torch"
    """Package that the networks are made of."""


def _pairs(images: int, size: int, length: int, words: int) -> Batch:
    ids = (
        torch.randint(1000, words - 1, (images, length)) if words > 1001 else torch.randint(1, words, (images, length))
    )
    ids[:, -1] = words - 1  # CLIP's end of text
    return {
        "image": torch.randn(images, 3, size, size),
        "input_ids": ids,
        "attention_mask": torch.ones(images, length, dtype=torch.long),
        "image_id": torch.arange(images),
        "sample_index": torch.arange(images),
    }


def _albef(folder: Path, toy: bool) -> LightningModule:
    from vlightning.lightning_modules import ALBEFModule

    options: Any = {"vision": {"image_size": 256}}
    if toy:
        small = {"width": 16, "heads": 2}
        options = {
            "vision": small | {"image_size": 16, "patch_size": 8, "depth": 2},
            "text": small | {"vocab_size": 2000, "ffn_width": 32, "depth": 1, "fusion_depth": 1},
            "contrast": {"embed_dim": 8, "queue_size": 64},
        }
    return ALBEFModule(**options)


def _albef_batch(images: int, toy: bool) -> Batch:
    batch = _pairs(images, *((16, 8, 2000) if toy else (256, 25, 30522)))
    batch["input_ids"][:, 0] = 101
    return batch


def _mobileclip(model: str, weight: float, folder: Path, toy: bool, captions: Any = "both") -> LightningModule:
    from vlightning.lightning_modules import MobileCLIPModule

    options: Any = {"teacher": {"dims": [768, 768], "scales": [100.0, 100.0], "distillation_weight": weight}}
    if toy:
        options |= {"vision": {"image_size": 32}, "max_tokens": 16}
    return MobileCLIPModule("MobileCLIP-tiny" if toy else model, captions=captions, **options)


def _mobileclip_batch(size: int, images: int, toy: bool) -> Batch:
    batch = _pairs(images, 32 if toy else size, 16 if toy else 77, 49408)
    for name in ("image", "text", "synthetic"):
        parts = [torch.nn.functional.normalize(torch.randn(images, 768), dim=-1) for _ in range(2)]
        batch[f"teacher_{name}"] = torch.cat(parts, 1)
    batch["synthetic_input_ids"] = batch["input_ids"].flip(0)
    batch["synthetic_attention_mask"] = batch["attention_mask"]
    return batch


def _clip_batch(images: int, toy: bool) -> Batch:
    return _pairs(images, 32 if toy else 224, 16 if toy else 77, 49408)


def _mmlg(folder: Path, toy: bool) -> LightningModule:
    import open_clip
    from safetensors.torch import save_file

    from vlightning.lightning_modules import MMLGModule

    if toy:
        from support.methods.mmlg import tiny_extraction, write_teacher

        return tiny_extraction(write_teacher(folder / "teacher.safetensors"))
    save_file(open_clip.create_model("ViT-B-16").state_dict(), folder / "teacher.safetensors")
    teacher = {"model": "ViT-B-16", "weights": str(folder / "teacher.safetensors")}
    options: Any = {"teacher": teacher, "vision": {"image_size": 224}}
    return MMLGModule(**options)


def _mmlg_batch(images: int, toy: bool) -> Batch:
    return _pairs(images, 16, 6, 49408) if toy else _pairs(images, 224, 77, 49408)


def _shre(folder: Path, toy: bool) -> LightningModule:
    import timm

    from vlightning.lightning_modules import SHReModule

    if toy:
        from support.methods.shre import tiny_shre

        return tiny_shre(folder)
    torch.save(timm.create_model("resnet50").state_dict(), folder / "teacher.pth")
    teacher: Any = {"name": "timm/resnet50", "weights": str(folder / "teacher.pth")}
    teacher |= {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
    return SHReModule(teacher=teacher)


def _shre_batch(images: int, toy: bool) -> Batch:
    if toy:
        from support.methods.shre import random_batch

        return random_batch(images, dtype=torch.float32)
    return _pairs(images, 224, 64, 30522)


def _cocord(folder: Path, toy: bool) -> LightningModule:
    from vlightning.lightning_modules import CoCoRDModule

    if toy:
        from support.methods.cocord import tiny_cocord

        return tiny_cocord(folder)
    import torchvision

    torch.save(torchvision.models.resnet34().state_dict(), folder / "teacher.pth")
    options: Any = {
        "teacher": {"name": "torchvision/resnet34", "weights": str(folder / "teacher.pth")},
        "contrast": {"queue_size": 65536, "temperature": 0.07},
    }
    return CoCoRDModule("torchvision/resnet18", 1000, **options)


def _cocord_batch(images: int, toy: bool) -> Batch:
    side, classes = (32, 5) if toy else (224, 1000)
    views = {name: torch.randn(images, 3, side, side) for name in ("image", "image_slow", "image_teacher")}
    return views | {"label": torch.randint(classes, (images,)), "sample_index": torch.arange(images)}


CASES = {
    "CLIP ViT-B/16, 224 px": Case(
        partial(_mobileclip, "ViT-B-16", 0.0, captions="real"), _clip_batch, 512, "open_clip"
    ),
    "ALBEF base, 256 px": Case(_albef, _albef_batch, 64),
    "MobileCLIP-S0, reinforced": Case(
        partial(_mobileclip, "MobileCLIP-S0", 1.0), partial(_mobileclip_batch, 256), 256, "open_clip"
    ),
    "MobileCLIP-B, reinforced": Case(
        partial(_mobileclip, "MobileCLIP-B", 0.75), partial(_mobileclip_batch, 224), 256, "open_clip"
    ),
    "MM-LG, extraction": Case(_mmlg, _mmlg_batch, 256, "open_clip"),
    "SHRe": Case(_shre, _shre_batch, 256),
    "CoCoRD, ResNet-34 to ResNet-18": Case(_cocord, _cocord_batch, 256),
}


def chosen(setting: Setting) -> list[str]:
    """Return the names of the cases to measure; say which are left out because their networks' package is missing."""
    names = list(filter(setting.chooses, CASES))
    missing = {CASES[name].package for name in names if not has(CASES[name].package)}
    for package in sorted(missing):
        left_out = "; ".join(name for name in names if CASES[name].package == package)
        setting.say(f"Left out, because {package} is missing: {left_out}.\n")
    return [name for name in names if CASES[name].package not in missing]
