"""A small image encoder and its probe for float64, and checkpoints with initial weights."""

import torch

from support.methods.groups import in_groups, merged
from vlightning.datamodules import ShapeClassesDataModule
from vlightning.lightning_modules import SHReImageClassifierModule

CLASSES, WIDTH, SIZE = 40, 16, 16
ENCODER = {"image_size": SIZE, "patch_size": 8, "width": WIDTH, "depth": 6, "heads": 2}
PLAIN = {"mix": {"mixup": 0.0, "cutmix": 0.0}}


def tiny_probe(seed=0, **options):
    """A module whose encoder has no initial values."""
    torch.manual_seed(seed)
    module = SHReImageClassifierModule(
        **merged({"num_classes": CLASSES, "vision": ENCODER}, in_groups(SHReImageClassifierModule, options))
    )
    with torch.no_grad():
        for name, parameter in module.encoder.named_parameters():
            if name != "pos_embed":
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return module


def shape_classes(**options):
    defaults = {"length": 32, "eval_length": 10, "batch_size": 8, "image_size": SIZE, "seed": 0}
    return ShapeClassesDataModule(**{**defaults, **options})


def shre_checkpoint(path, seed=3, **changes):
    """An encoder, and its checkpoint as a training of SHRe writes it."""
    encoder = tiny_probe(seed, vision=changes).encoder
    state = {f"student.image_encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    state["student.text_encoder.encoder.weight"] = torch.zeros(3)
    hparams = {"vision": {**ENCODER, "post_norm": True, **changes}}
    torch.save({"state_dict": state, "hyper_parameters": hparams}, path)
    return encoder


def random_batch(size=8, dtype=torch.float64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(size, 3, SIZE, SIZE, generator=generator, dtype=dtype)
    label = torch.randint(CLASSES, (size,), generator=generator)
    return {"image": image, "label": label, "sample_index": torch.arange(size)}
