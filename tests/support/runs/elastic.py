"""Runs of every method in float64 that can go on with another number of processes."""

import torch
import torch.distributed as dist
from lightning import Callback
from torch import nn

from support.methods.clip import SIZE, add_tiny_clip
from support.methods.methods import METHODS
from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, whole_state
from vlightning.callbacks import AtomicCheckpointIO, SkipNonFiniteSteps
from vlightning.callbacks.modules import is_batch_norm
from vlightning.callbacks.stopping import act_last
from vlightning.lightning_modules.mobileclip.range_augment import RangeAugment

BATCH, STEPS, STOP = 8, 3, 2
SETTINGS = {
    "albef": lambda: {"changes": {"contrast": {"negative_rows": 2}}},
    "mobileclip": lambda: {"model": add_tiny_clip(), "image_size": SIZE},
}


class Prepare(Callback):
    """Fixes the statistics of BatchNorm, writes a checkpoint after some steps, and records samples."""

    def __init__(self, path):
        self.path = path
        self.samples = []

    def setup(self, trainer, pl_module, stage):
        act_last(trainer, self)  # the checkpoint is written after averages and queues

    def on_fit_start(self, trainer, pl_module):
        for part in pl_module.modules():
            if is_batch_norm(part):
                part.eval()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.samples.append(batch["sample_index"].tolist())
        batch.update({name: column.double() for name, column in batch.items() if column.is_floating_point()})

    def on_train_batch_end(self, trainer, *_):
        if self.path is not None and trainer.global_step == STOP:
            trainer.save_checkpoint(self.path)


def build(method, prepared):
    """A method in float64 without dropout, with the draws of each method, and its data."""
    changes = SETTINGS.get(method, dict)()
    data = {"global_batch_size": BATCH, "num_workers": 0}
    module, data = METHODS[method].build(prepared, 0, **changes, **data)
    if method == "mobileclip":
        module.augment = RangeAugment((40.0, 20.0))
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    shard = module.configure_model

    def configure_model():
        module.double()  # frozen networks too, which `setup` has loaded
        shard()

    module.configure_model = configure_model
    return module, data


def train(kind, method, prepared, folder, save=None, resume=None):
    """Train in this process alone ("one"), or in each of a group ("ddp", "sharded").

    Args:
        kind: of the strategy.
        method: of `support.methods.methods`.
        prepared: what the method's `prepare` returned.
        folder: of the run.
        save: where to write a checkpoint after some steps.
        resume: a checkpoint to go on from.

    Returns:
        The final state, moments of the optimizer, and samples of each batch.
    """
    module, data = build(method, prepared)
    own = Prepare(save)
    options = {"max_steps": STEPS, "limit_val_batches": 0, "default_root_dir": folder}
    if kind == "one":
        options["plugins"] = [AtomicCheckpointIO()]
        run = trainer(own, SkipNonFiniteSteps(), use_distributed_sampler=False, **options)
    else:
        callbacks = [own, SkipNonFiniteSteps()]
        run = rank_trainer(kind, callbacks=callbacks, use_distributed_sampler=False, **options)
    run.fit(module, data, ckpt_path=resume)
    moments = {}
    for number, state in run.optimizers[0].state_dict()["state"].items():
        for name, value in state.items():
            value = torch.as_tensor(value)
            moments[f"{number}.{name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return {"state": whole_state(module), "moments": moments, "samples": own.samples}


def train_several(jobs):
    """Run several trainings one after the other in each process of a group."""
    results = []
    for job in jobs:
        results.append(train(*job))
        dist.barrier()
    return results
