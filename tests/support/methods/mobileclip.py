"""Weights that are functions of their names, nontrivial BatchNorm statistics, and inputs for MobileCLIP's models."""

import dataclasses
import functools
import math
import zlib
from unittest import mock

import timm
import torch
from torch import nn

from vlightning.lightning_modules.networks.clip.models import PRESETS, build_model


def build_shallow(name, image_size=None):
    """Build a preset with two blocks in its image tower, one of each kind, and a narrow text tower of one layer."""
    preset = PRESETS[name]
    few = {"depth": 2} if preset.image_tower.startswith("vit") else {"layers": (1, 0, 0, 1)}
    with (
        mock.patch.object(timm, "create_model", functools.partial(timm.create_model, **few)),
        mock.patch.dict(PRESETS, {name: dataclasses.replace(preset, width=64, layers=1)}),
    ):
        return build_model(name, image_size)


def fill(key, shape):
    """Return the tensor of a name, as in the reference run of the golden file."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    if key.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.long)
    if key.endswith("running_var"):
        return 1 + 0.3 * torch.rand(shape, generator=generator)
    if key.endswith("running_mean"):
        return 0.05 * torch.randn(shape, generator=generator)
    if key == "logit_scale":
        return torch.tensor(4.0)
    normal = torch.randn(shape, generator=generator)
    if "layer_scale" in key or key.endswith("gamma"):
        return 0.1 + 0.05 * normal
    if len(shape) >= 2:
        if "pos_embed" in key:
            return 0.02 * normal
        return normal * (0.05 if "embedding_layer" in key else (1 / math.prod(shape[1:])) ** 0.5)
    return 0.05 * normal if key.endswith("bias") else 1 + 0.1 * normal


def settle(model, seed=0):
    """Give norms and scales nontrivial values, and set eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like, low, high):
        return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=like.dtype)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:
                parameter.copy_(uniform(parameter, 0.05, 0.2))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(uniform(module.running_mean, -0.2, 0.2))
                module.running_var.copy_(uniform(module.running_var, 0.5, 1.5))
                module.weight.copy_(uniform(module.weight, 0.7, 1.3))
                module.bias.copy_(uniform(module.bias, -0.2, 0.2))
    return model.eval()


def random_images(number, size):
    """Return images [N, 3, S, S] on the 0-1 scale."""
    return torch.rand(number, 3, size, size, generator=torch.Generator().manual_seed(3))


def texts(number, length=77):
    """Return token ids [N, L] of texts shorter than L."""
    ids = torch.randint(1, 49406, (number, length), generator=torch.Generator().manual_seed(4))
    ids[:, length // 2 :] = 0
    ids[:, length // 2] = 49407
    return ids


@torch.no_grad()
def features(model, images, ids):
    """Return the features of both towers."""
    return model.encode_image(images), model.encode_text(ids)
