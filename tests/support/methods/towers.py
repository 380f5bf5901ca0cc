"""Image-text models with few layers, inputs for them, and their features: for towers and programs."""

import functools

import open_clip
import torch
import torch.nn.functional as F
from torch import nn

from support.methods.mobileclip import build_shallow, settle
from vlightning.lightning_modules.networks.clip.models import build_model

SIZE = 64
PLAIN = {
    "embed_dim": 24,
    "vision_cfg": {"layers": 1, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": 1},
}


def batch(model, count, size=SIZE, seed=5):
    """Return dissimilar images and texts."""
    generator = torch.Generator().manual_seed(seed)
    length, end = model.context_length, model.vocab_size - 1
    ids = torch.randint(1, end, (count, length), generator=generator)
    for row, last in zip(ids, torch.randint(1, length, (count,), generator=generator), strict=True):
        row[last:] = 0
        row[last] = end
    return F.interpolate(torch.rand(count, 3, 4, 4, generator=generator), size), ids


@functools.cache
def trained(name):
    """Return a model, of which the real ones have few layers.

    Its BatchNorm statistics are those of its inputs; otherwise all images have nearly equal features.
    """
    torch.manual_seed(0)
    model = settle((build_model if name == "MobileCLIP-tiny" else build_shallow)(name, SIZE))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
    features(model.train(), *batch(model, 8, seed=6))
    return model.eval()


@torch.no_grad()
def features(model, images, ids, normalize=True):
    return model.encode_image(images, normalize=normalize), model.encode_text(ids, normalize=normalize)


def plain_clip(**options):
    torch.manual_seed(0)
    return open_clip.CLIP(**PLAIN, **options).eval()


def smallest_cosine(found, expected):
    return float(F.cosine_similarity(found.float(), expected.float()).min())
