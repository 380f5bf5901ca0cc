"""A training run in a separate process that can kill itself, as on a cluster.

Every batch's sample indices go to FOLDER/samples-<rank>.jsonl, the metrics of every validation to
FOLDER/validations-<rank>.jsonl, the final state to FOLDER/final.ckpt.
"""

import json
import multiprocessing
import os
import signal
from pathlib import Path

from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from support.methods.methods import METHODS, OTHERS, ROWS
from support.runs.distributed import rank_trainer
from vlightning.callbacks import AtomicCheckpointIO, StopOnSignal
from vlightning.callbacks.distributed import strategy as sharded_strategy
from vlightning.common import files
from vlightning.common.files import swap_in

EPOCHS, BATCH = 3, 8
BATCHES_AN_EPOCH = ROWS["length"] // BATCH


class Recorder(Callback):
    """Records the samples of each batch, and the metrics of validations by number of batches."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.write("samples", trainer, batch["sample_index"].tolist())

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
            self.write("validations", trainer, metrics)

    def write(self, name, trainer, content):
        with (self.folder / f"{name}-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.fit_loop.epoch_loop.batch_progress.total.ready, content]) + "\n")


class Sender(Callback):
    """Sends the process one signal in a hook, when a number of batches have begun."""

    def __init__(self, name, hook, batch):
        self.sent = False

        def send(trainer, *_):
            begun = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            if begun >= batch and not trainer.sanity_checking and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.Signals[name])

        def setup(trainer, *_, **__):
            """Sends the signal during a checkpoint, after its content is written and before it is renamed."""

            def killed_swap_in(*args):
                send(trainer)
                swap_in(*args)

            files.swap_in = sharded_strategy.swap_in = killed_swap_in

        if hook == "checkpoint":
            self.setup = setup
        else:
            setattr(self, hook, send)


def train(
    folder: str,
    method: str,
    seed: int,
    *,
    every_n_steps: int | None = None,
    accumulate: int = 1,
    workers: int = 2,
    processes: int = 1,
    sharded: bool = False,
    outside: str | None = None,
    send: tuple[str, str, int] | None = None,
    resume: str | None = None,
):
    """Train in one rank of a process group.

    Args:
        folder: where to write.
        method: of `support.methods.methods`.
        seed: of the run.
        every_n_steps: between two checkpoints; None: at the end of each epoch.
        accumulate: batches a step.
        workers: of the loader.
        processes: as many as there are in the group.
        sharded: by FSDP2, or else DDP where there are several.
        outside: what the method's `prepare` returned.
        send: a signal's name, the hook that sends it, and how many batches must have begun.
        resume: a checkpoint.
    """
    # Loader workers as an ordinary program has them.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    seed_everything(seed, verbose=False)
    module, data = (METHODS | OTHERS)[method].build(outside, seed, batch_size=BATCH // processes, num_workers=workers)
    checkpoints = {"every_n_train_steps": every_n_steps} if every_n_steps else {"every_n_epochs": 1}
    callbacks = [
        Recorder(Path(folder)),
        StopOnSignal(folder),
        ModelCheckpoint(folder, filename="{step}", save_top_k=1, save_last=True, **checkpoints),
    ]
    if send:
        callbacks.append(Sender(*send))
    options = {
        "accelerator": "cpu",
        "use_distributed_sampler": False,
        "plugins": [AtomicCheckpointIO()],
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": accumulate,
        "callbacks": callbacks,
        "logger": False,
        "enable_checkpointing": True,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    trainer = Trainer(**options) if processes == 1 else rank_trainer("sharded" if sharded else "ddp", **options)
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(Path(folder) / "final.ckpt")
