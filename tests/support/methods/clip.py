"""A CLIP small enough for float64, without BatchNorm, and reinforced batches for it."""

import json
import tempfile
from pathlib import Path

import open_clip
import torch
from timm.models import generate_default_cfgs, register_model

from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.networks.clip.shapes import fastvit_mci_tiny

NAME, LENGTH, SIZE, WORDS = "tiny-clip-of-the-tests", 6, 16, 49408
DIMS, SCALES = [5, 7], [20.0, 40.0]

# timm looks for this name when it registers the model, and warns without it.
default_cfgs = generate_default_cfgs({"fastvit_mci_shallow.untrained": {"input_size": (3, 64, 64), "num_classes": 128}})


@register_model
def fastvit_mci_shallow(pretrained=False, **kwargs):
    """Build `fastvit_mci_tiny` with two blocks, one of each kind, and all of its downsampling."""
    return fastvit_mci_tiny(pretrained, **({"layers": (1, 0, 0, 1)} | kwargs))


def add_tiny_clip():
    """Register the model with open_clip on the first call."""
    return add_clip(NAME, {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8})


def add_clip(name, vision):
    """Register a model with a text tower of one narrow layer with open_clip on the first call; return its name."""
    if name in open_clip.list_models():
        return name
    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": SIZE} | vision,
        "text_cfg": {"context_length": LENGTH, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(config))
        open_clip.add_model_config(path)
    return name


def randomized(model, seed=0, scale=3.0):
    """Randomize all weights of a CLIP, large enough for the activation function to matter, and set eval mode.

    Args:
        model: any of open_clip's.
        seed: of the weights.
        scale: logarithm of its logit scale.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "ln_" in name and name.endswith("weight")
            parameter.copy_(norm + 0.3 * torch.randn(parameter.shape, generator=generator))
        model.logit_scale.fill_(scale)
    return model.eval()


def tiny_module(seed=0, distillation_weight=1.0, **options):
    torch.manual_seed(seed)
    teacher = {"dims": DIMS, "scales": SCALES, "distillation_weight": distillation_weight}
    module = MobileCLIPModule(add_tiny_clip(), **{"max_tokens": LENGTH, "teacher": teacher} | options)
    module.log = module.log_dict = lambda *_, **__: None
    return module


def reinforced_batch(rows, seed=0, dtype=torch.float64, size=SIZE, length=LENGTH, words=WORDS):
    generator = torch.Generator().manual_seed(seed)

    def unit():
        parts = [torch.randn(rows, width, generator=generator, dtype=dtype) for width in DIMS]
        return torch.cat([torch.nn.functional.normalize(part, dim=-1) for part in parts], 1)

    def texts():
        ids = torch.randint(1, words - 1, (rows, length), generator=generator)
        ids[:, -1] = words - 1
        return ids

    return {
        "image": torch.rand(rows, 3, size, size, generator=generator, dtype=dtype),
        "input_ids": texts(),
        "synthetic_input_ids": texts(),
        "teacher_image": unit(),
        "teacher_text": unit(),
        "teacher_synthetic": unit(),
    }
