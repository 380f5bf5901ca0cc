"""An extraction small enough for float64, and a teacher for it in a file."""

import open_clip
import torch
from lightning import Trainer
from safetensors.torch import save_file

from support.methods.clip import LENGTH, SIZE, WORDS, add_tiny_clip
from support.methods.groups import in_groups
from vlightning.lightning_modules import MMLGModule

SIZES = {"width": 16, "heads": 2, "depth": 4, "embed_dim": 12, "patch_size": 8, "image_size": SIZE}


def write_teacher(path, seed=7):
    """A trained model's file; its features are 8 wide, its scale is 20."""
    torch.manual_seed(seed)
    model = open_clip.create_model(add_tiny_clip())
    with torch.no_grad():
        model.logit_scale.fill_(torch.tensor(20.0).log())
    save_file(model.state_dict(), path)
    return str(path)


def tiny_extraction(teacher, seed=0, **options):
    add_tiny_clip()
    torch.manual_seed(seed)
    defaults = {"max_tokens": LENGTH, "vocab_size": WORDS, "warmup_steps": 2}
    if teacher is None:
        defaults["distillation_weight"] = 0.0
    else:
        defaults |= {"model": add_tiny_clip(), "teacher.weights": teacher}
    return MMLGModule(**in_groups(MMLGModule, SIZES | defaults | options))


def ready(module):
    """With its teacher, in float64, and without a Trainer to log to."""
    module.setup("fit")
    module.log = module.log_dict = lambda *_, **__: None
    return module.double()


def trained_checkpoint(folder, **options):
    """A module with random weights, in eval mode, and its checkpoint as a training writes it."""
    module = tiny_extraction(None, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    return module.eval(), str(folder / "last.ckpt")
