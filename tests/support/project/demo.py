"""A folder of drawn images with captions, and a small ALBEF that was exported, for the demo."""

import json

from lightning.pytorch import Trainer

from support.methods.albef import IMAGE_SIZE, MAX_TOKENS, tiny_albef
from support.runs.command_line import run
from vlightning.datamodules import ShapesDataModule
from vlightning.datamodules.drawn.shapes import ShapesTable

TEXT = "a large red circle above a small blue square"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def write_images(folder, count=20):
    """Write images, one in a folder below, and their captions; return the names."""
    table = ShapesTable("test", 1, count, 32, 0)
    names = [f"{row:02d}.png" if row else "below/00.png" for row in range(count)]
    (folder / "below").mkdir(parents=True)
    for row, name in enumerate(names):
        table.image(row).save(folder / name)
    rows = [{"image": name, "caption": table.captions(row)[0]} for row, name in enumerate(names)]
    (folder / "captions.json").write_text(json.dumps(rows))
    return names


def write_model(folder, seed=0):
    """Train an ALBEF with two fusion layers for a step, export it to a folder, and return the folder."""
    data = ShapesDataModule(
        length=16,
        eval_length=8,
        vocab_size=200,
        max_tokens=MAX_TOKENS,
        image_size=IMAGE_SIZE,
        batch_size=8,
        num_workers=0,
    )
    module = tiny_albef(seed, text={"vocab_size": 200, "fusion_depth": 2})
    trainer = Trainer(**QUIET, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / f"{seed}.ckpt")
    ran = run("export", folder / f"{seed}.ckpt", folder / f"model{seed}", "--layout", "vlightning")
    assert ran.status == 0, ran.err
    return folder / f"model{seed}"
