"""A vision classifier small enough for float64, and checkpoints for it to start from."""

import torch

from support.methods.groups import in_groups
from support.methods.learngene import PATCH, SIZE, WIDTH, clip
from vlightning.datamodules import ShapeClassesDataModule
from vlightning.lightning_modules import MMLGImageClassifierModule

CLASSES = 40
TOWER = {"width": WIDTH, "heads": 2, "depth": 6, "patch_size": PATCH, "image_size": SIZE}


def tiny_classifier(seed=0, **options):
    torch.manual_seed(seed)
    return MMLGImageClassifierModule(
        **in_groups(MMLGImageClassifierModule, {"num_classes": CLASSES, "warmup_steps": 3} | TOWER | options)
    )


def shape_classes(**options):
    defaults = {"length": 32, "eval_length": 10, "batch_size": 8, "image_size": SIZE, "seed": 0}
    return ShapeClassesDataModule(**{**defaults, **options})


def descendant(path, layers=6, seed=3, **changes):
    """A CLIP without initial values, and its checkpoint as a training writes it."""
    network = clip(layers, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    state = {f"student.{name}": tensor for name, tensor in network.state_dict().items()}
    towers = {"width": WIDTH, "heads": 2, "depth": layers, "embed_dim": 8}
    torch.save({"state_dict": state, "hyper_parameters": {"towers": towers}}, path)
    return network


def random_batch(size=8, dtype=torch.float64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(size, 3, SIZE, SIZE, generator=generator, dtype=dtype)
    label = torch.randint(CLASSES, (size,), generator=generator)
    return {"image": image, "label": label, "sample_index": torch.arange(size)}
