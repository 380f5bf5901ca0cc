"""A training run that can kill itself, as a script: the process really ends, as on a cluster.

    python killed_run.py FOLDER SEED EVERY_N_STEPS ACCUMULATE [--kill HOOK BATCH] [--resume CHECKPOINT] [--fine-tuning]
        [--cocord TEACHER] [--mobileclip SHARDS] [--mmlg TEACHER] [--shre TEACHER] [--classifier] [--captioning FOLDER]

Every batch's sample indices go to FOLDER/samples.jsonl, the final state to FOLDER/final.ckpt. Fine-tuning for retrieval
goes without masked words, in micro-batches, and re-ranks in validation. With a teacher's file it is CoCoRD that trains,
on labelled shapes, or MM-LG or SHRe, in slices; with a folder for shards MobileCLIP, in slices, on reinforced shapes;
with a folder that holds `captions.json`, the arguments of the data, captioning, which writes captions in validation; or
a vision classifier, on labelled shapes.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from support.albef import SIZES, tiny_albef
from support.captioning import caption_data, caption_module
from support.classifier import shape_classes, tiny_classifier
from support.clip import LENGTH, SIZE, WORDS
from support.cocord import HEADS
from support.mmlg import tiny_extraction
from support.shre import tiny_shre
from vlightning.datamodules import ReinforcedShapesDataModule, ShapeClassesDataModule, ShapesDataModule
from vlightning.lightning_modules import CoCoRDModule, MobileCLIPModule

BATCHES_AN_EPOCH, EPOCHS, BATCH = 4, 3, 8


class Recorder(Callback):
    """Writes down which samples each batch held."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with self.path.open("a") as file:
            total = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            file.write(json.dumps([total, batch["sample_index"].tolist()]) + "\n")


class Killer(Callback):
    """Ends the process without any clean-up in a hook, once so many batches have begun."""

    def __init__(self, hook, batch):
        def kill(trainer, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.total.ready >= batch and not trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, hook, kill)


def albef_run(args):
    data = ShapesDataModule(
        length=BATCHES_AN_EPOCH * BATCH,
        eval_length=10,
        batch_size=BATCH,
        num_workers=2,
        image_size=SIZES["image_size"],
        vocab_size=200,
        max_tokens=SIZES["max_positions"],
    )
    changes = {"mlm": False, "micro_batch_size": 3, "rerank_on": "always", "rerank_k": 10} if args.fine_tuning else {}
    return tiny_albef(args.seed, vocab_size=200, **changes), data


def cocord_run(args):
    data = ShapeClassesDataModule(
        length=BATCHES_AN_EPOCH * BATCH, eval_length=10, batch_size=BATCH, num_workers=2, image_size=16
    )
    torch.manual_seed(args.seed)
    module = CoCoRDModule(
        "resnet8",
        data.num_classes,
        teacher="resnet14",
        teacher_weights=args.cocord,
        queue_size=24,
        kd_weight=1.0,
        **HEADS,
    )
    return module, data


def mobileclip_run(args):
    data = ReinforcedShapesDataModule(
        args.mobileclip,
        length=BATCHES_AN_EPOCH * BATCH,
        eval_length=10,
        augmentations=2,
        batch_size=BATCH,
        num_workers=2,
        image_size=32,
    )
    torch.manual_seed(args.seed)
    module = MobileCLIPModule(
        "MobileCLIP-tiny",
        image_size=32,
        max_tokens=16,
        teacher_dims=[64, 96],
        teacher_scales=[30.0, 30.0],
        average_momentum=0.9,
        warmup_steps=3,
        micro_batch_size=4,
    )
    return module, data


def mmlg_run(args):
    data = ShapesDataModule(
        length=BATCHES_AN_EPOCH * BATCH,
        eval_length=10,
        batch_size=BATCH,
        num_workers=2,
        image_size=SIZE,
        tokenizer="clip",
        vocab_size=WORDS,
        max_tokens=LENGTH,
    )
    return tiny_extraction(args.mmlg, args.seed, warmup_steps=3, micro_batch_size=4), data


def shre_run(args):
    data = ShapesDataModule(
        length=BATCHES_AN_EPOCH * BATCH, eval_length=10, batch_size=BATCH, num_workers=2, image_size=16, max_tokens=8
    )
    taught = {"teacher": "resnet8", "teacher_weights": args.shre, "kl_weight": 1.0}
    return tiny_shre(None, args.seed, vocab_size=320, micro_batch_size=3, dropout=0.1, **taught), data


def classifier_run(args):
    return tiny_classifier(args.seed), shape_classes(length=BATCHES_AN_EPOCH * BATCH, num_workers=2, seed=None)


def captioning_run(args):
    arguments = json.loads((Path(args.captioning) / "captions.json").read_text())
    data = caption_data(arguments, train=[arguments["train"]] * 2, batch_size=BATCH, num_workers=2, seed=None)
    return caption_module(arguments, args.seed, warmup_steps=3), data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("every_n_steps", type=int)
    parser.add_argument("accumulate", type=int)
    parser.add_argument("--kill", nargs=2)
    parser.add_argument("--resume")
    parser.add_argument("--fine-tuning", action="store_true")
    parser.add_argument("--cocord")
    parser.add_argument("--mobileclip")
    parser.add_argument("--mmlg")
    parser.add_argument("--shre")
    parser.add_argument("--classifier", action="store_true")
    parser.add_argument("--captioning")
    args = parser.parse_args()

    seed_everything(args.seed, verbose=False)
    runs = {
        "cocord": cocord_run,
        "mobileclip": mobileclip_run,
        "mmlg": mmlg_run,
        "shre": shre_run,
        "classifier": classifier_run,
        "captioning": captioning_run,
    }
    module, data = next((run for name, run in runs.items() if getattr(args, name)), albef_run)(args)
    checkpoints = {"every_n_train_steps": args.every_n_steps} if args.every_n_steps else {"every_n_epochs": 1}
    callbacks = [
        Recorder(args.folder / "samples.jsonl"),
        ModelCheckpoint(args.folder, filename="{step}", save_top_k=1, save_last=True, **checkpoints),
    ]
    if args.kill:
        callbacks.append(Killer(args.kill[0], int(args.kill[1])))
    trainer = Trainer(
        accelerator="cpu",
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
