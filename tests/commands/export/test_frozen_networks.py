"""Exports of modules whose frozen network is not in the checkpoint: they hold it, and read it back."""

import json
import shutil

import torch
from lightning.pytorch import Trainer

from support.methods.cocord import teacher_file
from support.methods.methods import OTHERS
from support.runs.command_line import run
from vlightning.commands.export import from_pretrained
from vlightning.datamodules import ShapeClassesDataModule
from vlightning.lightning_modules import CoCoRDLinearProbeModule

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def trained(module, data, folder):
    """Train a step, and write a checkpoint."""
    trainer = Trainer(**QUIET, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.eval()


def exported(folder):
    return run("export", folder / "last.ckpt", folder / "my-model", "--layout", "vlightning")


@torch.no_grad()
def test_a_linear_probe_is_exported_with_its_backbone(tmp_path):
    weights = teacher_file(tmp_path, "resnet8", 5)
    data = ShapeClassesDataModule(length=40, eval_length=10, batch_size=8, image_size=16, num_workers=0)
    with torch.enable_grad():
        module = trained(CoCoRDLinearProbeModule("resnet8", 5, weights, num_classes=40), data, tmp_path)
    assert exported(tmp_path).status == 0
    other = teacher_file(tmp_path, "resnet8", 5, seed=2)
    shutil.move(other, weights)
    shutil.move(tmp_path / "my-model", tmp_path / "moved")
    assert "backbone that the checkpoint was trained with" in exported(tmp_path).sentence
    (tmp_path / weights.rpartition("/")[2]).unlink()
    assert "Expected a trained backbone in" in exported(tmp_path).sentence

    model, transform, tokenizer = from_pretrained(tmp_path / "moved")
    image = torch.rand(3, 3, 16, 16)
    torch.testing.assert_close(model(image), module(image), rtol=0, atol=1e-6)
    assert tokenizer is None
    assert transform is not None


def test_captioning_is_exported_with_its_language_model(tmp_path):
    method = OTHERS["captioning"]
    place = method.prepare(tmp_path)
    module, data = method.build(place, seed=0)
    trained(module, data, tmp_path)
    assert exported(tmp_path).status == 0
    folder = tmp_path / "my-model"
    embedding = torch.randn(3, module.embed_dim)
    expected = module(embedding)
    shutil.rmtree(place)
    model, transform, tokenizer = from_pretrained(folder)
    assert model(embedding) == expected
    assert (transform, tokenizer) == (None, None)
    tower = json.loads((folder / "tower.json").read_text())
    assert tower == model.tower
    assert tower["sha256"] == module.tower["sha256"]
    assert "captions = model(embeddings)" in (folder / "README.md").read_text()
