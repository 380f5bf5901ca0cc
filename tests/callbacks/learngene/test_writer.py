"""The learngene of a module is written when a fit ends."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from support.methods.learngene import learngene
from support.methods.tiny_modules import trainer
from vlightning.callbacks import LearngeneWriter
from vlightning.callbacks.learngene.file import load_learngene
from vlightning.common.errors import UserError


class Extraction(BoringModel):
    def learngene(self):
        return learngene()


class Data(LightningDataModule):
    def __init__(self, rows=4):
        super().__init__()
        self.save_hyperparameters()
        self.hparams["_class_path"] = "as the command line writes it"

    def train_dataloader(self):
        return DataLoader(torch.randn(self.hparams["rows"], 32), batch_size=2)


def fit(callback, module=None, **options):
    defaults = {"limit_val_batches": 0, "max_epochs": 3}
    return trainer(callback, **{**defaults, **options}).fit(module or Extraction(), datamodule=Data())


@pytest.mark.parametrize("named", [True, False])
def test_the_learngene_is_written_at_the_end(tmp_path, named):
    target = tmp_path / ("new/l.safetensors" if named else "learngene.safetensors")
    fit(LearngeneWriter(str(target) if named else None, "float16"), default_root_dir=tmp_path)
    read, written = load_learngene(target), learngene()
    assert (read.step, read.data, read.teacher) == (6, {"class": "Data", "rows": 4}, written.teacher)
    name = "blocks.text.1.qkv.weight"
    assert torch.equal(read.tensors[name], written.tensors[name].half().float())


def test_an_existing_file_or_another_module_is_refused_before_training(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="Expected a new name"):
        fit(LearngeneWriter(str(tmp_path / "a")))
    (tmp_path / "learngene.safetensors").touch()  # of an earlier run in the same folder
    with pytest.raises(UserError, match="Expected a new name"):
        fit(LearngeneWriter(), default_root_dir=tmp_path)
    with pytest.raises(
        UserError, match=r"Expected a module with a method learngene\(\) for LearngeneWriter, got BoringModel"
    ):
        fit(LearngeneWriter(str(tmp_path / "b")), BoringModel())


def test_fast_dev_run_writes_nothing(tmp_path):
    fit(LearngeneWriter(str(tmp_path / "a")), fast_dev_run=True)
    assert not list(tmp_path.iterdir())
