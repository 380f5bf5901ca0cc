"""Moments have their weights' memory format after loading any checkpoint: a fused step equals a plain loop."""

import json
import os
import tempfile
from pathlib import Path

import open_clip
import pytest
import torch
from lightning import Callback

from support.methods.clip import DIMS, LENGTH, SCALES, reinforced_batch
from support.methods.random_batches import Rows
from support.methods.tiny_modules import trainer
from support.runs.command_line import convert
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.lightning_modules import MobileCLIPModule

SIZE, WORDS = 32, 50
TOWERS = {  # with dense convolutions of several pixels, as RN50 and ConvNeXt have
    "resnet": {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
    "convnext": {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear"},
}


def build(tower):
    name = f"layout-{tower}"
    text = {"context_length": LENGTH, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(
            json.dumps({"embed_dim": 8, "vision_cfg": {"image_size": SIZE} | TOWERS[tower], "text_cfg": text})
        )
        open_clip.add_model_config(path)
    torch.manual_seed(0)
    teacher, optim = {"dims": DIMS, "scales": SCALES}, {"learning_rate": 0.01, "warmup_steps": 1}
    return MobileCLIPModule(name, max_tokens=LENGTH, teacher=teacher, optim=optim)


class Until(Callback):
    """Ends a run after so many steps, with the schedule of a longer one."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.step


class Loop(Callback):
    """Makes the optimizer step weight by weight, in torch's plain loop."""

    def on_train_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group.update(fused=False, foreach=False)


def fit(make, tower, steps, *callbacks, **options):
    options_of_trainer = {"max_steps": 8, "max_epochs": -1, "min_epochs": 0, "limit_val_batches": 0}
    fitted = make(callbacks=[Until(steps), *callbacks], **options_of_trainer)
    rows = Rows(reinforced_batch(8, dtype=torch.float32, size=SIZE, words=WORDS))
    loader = torch.utils.data.DataLoader(rows, batch_size=8 // fitted.world_size)
    fitted.fit(build(tower), loader, **options)
    return fitted


def one_process(callbacks, **options):
    return trainer(*callbacks, plugins=[AtomicCheckpointIO()], **options)


def both_ways(make, tower, checkpoint, save=None):
    """The state after going on with a step, fused and in a loop; the former may be saved."""
    steps = AtomicCheckpointIO().load_checkpoint(checkpoint)["global_step"] + 1
    fused = fit(make, tower, steps, ckpt_path=checkpoint)
    if save is not None:
        fused.save_checkpoint(save)
    loop = fit(make, tower, steps, Loop(), ckpt_path=checkpoint)
    return whole_state(fused.lightning_module), whole_state(loop.lightning_module)


def on_rank(folder):
    def under(kind):
        return lambda **options: rank_trainer(kind, plugins=[AtomicCheckpointIO()], **options)

    ways = {}
    for tower in TOWERS:
        many, one = os.path.join(folder, f"{tower}.ckpt"), os.path.join(folder, f"{tower}-ddp.ckpt")
        fit(under("sharded"), tower, 2).save_checkpoint(many)
        ways[tower, "to ddp"] = both_ways(under("ddp"), tower, many, save=one)
        ways[tower, "from ddp's file to sharded"] = both_ways(under("sharded"), tower, one)
    return ways


@pytest.mark.slow
def test_a_step_after_loading_equals_a_plain_loop(tmp_path):
    ways = run_distributed(on_rank, str(tmp_path), timeout=300)[0]
    for tower in TOWERS:
        many, file = str(tmp_path / f"{tower}.ckpt"), str(tmp_path / f"{tower}-one.ckpt")
        convert([many, file])
        ways[tower, "to one"] = both_ways(one_process, tower, many)
        ways[tower, "converted"] = both_ways(one_process, tower, file)
    for (tower, way), (fused, loop) in ways.items():
        before = AtomicCheckpointIO().load_checkpoint(tmp_path / f"{tower}.ckpt")["state_dict"]
        moved = 0
        for name, expected in loop.items():
            difference = (fused[name].double() - expected.double()).abs().max()
            assert difference < 1e-5, (tower, way, name)
            kernel = expected.dim() == 4 and min(expected.shape[1:]) > 1
            moved += kernel and bool(((expected - before[name]).abs() > 1e-3).any())
        assert moved > 1, (tower, way)  # dense convolutions of several pixels
