"""A training run that can kill itself, as a script: the process really ends, as on a cluster.

    python killed_run.py FOLDER METHOD SEED [--every-n-steps N] [--accumulate N] [--workers N] [--processes N]
        [--sharded] [--outside PATH] [--signal NAME HOOK BATCH] [--resume CHECKPOINT]

METHOD and PATH as in `support.methods`. Every batch's sample indices go to FOLDER/samples-<rank>.jsonl, the metrics of
every validation to FOLDER/validations-<rank>.jsonl, the final state to FOLDER/final.ckpt. Checkpoints are written every
so many steps, or at the end of each epoch.
"""

import argparse
import json
import os
import signal
from pathlib import Path

from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from support.methods import METHODS, OTHERS, ROWS
from vlightning.callbacks import AtomicCheckpointIO, ShardedStrategy, StopOnSignal, checkpoint_io, sharded_strategy
from vlightning.callbacks.checkpoint_io import swap_in

EPOCHS, BATCH = 3, 8
BATCHES_AN_EPOCH = ROWS["length"] // BATCH


class Recorder(Callback):
    """Writes down which samples each batch held, and what was measured after so many batches."""

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
    """Sends the process a signal in a hook, once, when so many batches have begun."""

    def __init__(self, name, hook, batch):
        self.sent = False

        def send(trainer, *_):
            begun = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            if begun >= batch and not trainer.sanity_checking and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.Signals[name])

        def setup(trainer, *_, **__):
            """In the middle of a checkpoint: all of it is written, and has not got its name yet."""

            def killed_swap_in(*args):
                send(trainer)
                swap_in(*args)

            checkpoint_io.swap_in = sharded_strategy.swap_in = killed_swap_in

        if hook == "checkpoint":
            self.setup = setup
        else:
            setattr(self, hook, send)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("method")
    parser.add_argument("seed", type=int)
    parser.add_argument("--every-n-steps", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--outside")
    parser.add_argument("--signal", nargs=3)
    parser.add_argument("--resume")
    args = parser.parse_args()

    seed_everything(args.seed, verbose=False)
    build = (METHODS | OTHERS)[args.method].build
    module, data = build(args.outside, args.seed, batch_size=BATCH // args.processes, num_workers=args.workers)
    checkpoints = {"every_n_train_steps": args.every_n_steps} if args.every_n_steps else {"every_n_epochs": 1}
    callbacks = [
        Recorder(args.folder),
        StopOnSignal(str(args.folder)),
        ModelCheckpoint(args.folder, filename="{step}", save_top_k=1, save_last=True, **checkpoints),
    ]
    if args.signal:
        name, hook, batch = args.signal
        callbacks.append(Sender(name, hook, int(batch)))
    strategy = ShardedStrategy() if args.sharded else "ddp" if args.processes > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu",
        devices=args.processes,
        strategy=strategy,
        use_distributed_sampler=False,
        plugins=[AtomicCheckpointIO()],
        max_epochs=EPOCHS,
        accumulate_grad_batches=args.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
    )
    trainer.fit(module, data, ckpt_path=args.resume)
    trainer.save_checkpoint(args.folder / "final.ckpt")


if __name__ == "__main__":
    main()
