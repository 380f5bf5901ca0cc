"""A learngene small enough for float64, and networks that it is expanded into."""

from functools import partial

import open_clip
import timm
import torch
from torch import nn

from vlightning.callbacks.learngene.file import Learngene
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.lightning_modules.mmlg.network import LearngeneCLIP

WIDTH, EMBED, SIZE, PATCH, LENGTH, WORDS = 16, 8, 16, 8, 6, 30
SIZES = LearngeneSizes(
    width=WIDTH, heads=2, embed_dim=EMBED, image_size=SIZE, patch_size=PATCH, max_tokens=LENGTH, vocab_size=WORDS
)


def auxiliary(seed=0, sizes=SIZES, kind=LearngeneCLIP):
    """All parameters random, so that a missing one is noticed."""
    network = kind(sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            around = 1.0 if ".norm" in name or ".ln_" in name else 0.0
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator))
        network.logit_scale.fill_(2.5)
    return network


def learngene(seed=0):
    network = auxiliary(seed)
    state = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    return Learngene(state, SIZES, "MM-LG", {"name": "T", "weights": "w", "sha256": "0"}, {"class": "Data"}, 7)


def clip(vision=12, text=None, custom=False, width=WIDTH, heads=2, quick=False, **changes):
    vision_cfg = {"image_size": SIZE, "layers": vision, "width": width, "head_width": width // heads}
    text_cfg = {"context_length": LENGTH, "vocab_size": WORDS, "width": width, "heads": heads}
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    return kind(
        EMBED,
        {**vision_cfg, "patch_size": PATCH, **changes},
        {**text_cfg, "layers": vision if text is None else text},
        quick_gelu=quick,
    ).eval()


def timm_vit(depth=12, **changes):
    options = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "num_heads": 2, "pre_norm": True}
    options |= {"depth": depth, "num_classes": 3, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}
    return timm.models.VisionTransformer(**{**options, **changes}).eval()


def random_images(rows=3, dtype=torch.float64):
    return torch.randn(rows, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5), dtype=dtype)


def texts(rows=3):
    ids = torch.randint(1, WORDS - 1, (rows, LENGTH), generator=torch.Generator().manual_seed(6))
    for row in range(rows):
        ids[row, LENGTH - 1 - row % 3] = WORDS - 1
        ids[row, LENGTH - row % 3 :] = 0
    return ids
