"""The error of a checkpoint that does not fit names its class, or the setting that differs."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from support.methods.albef import SIZES, pairs_loader, tiny_albef
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.lightning_modules import ALBEFModule, CoCoRDModule
from vlightning.lightning_modules.core.settings import flat


def trainer(folder: Path) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=folder, max_steps=1, **quiet)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("albef")
    fit = trainer(folder)
    fit.fit(tiny_albef(), pairs_loader(8, 4))
    path = str(folder / "albef.ckpt")
    fit.save_checkpoint(path)
    return path


def test_a_forgotten_argument_is_named_on_resume(tmp_path: Path, checkpoint: str):
    changed = {"contrast": {"embed_dim": 16}, "optim": {"learning_rate": 0.5}}
    with pytest.raises(UserError, match="does not fit") as raised:
        trainer(tmp_path).fit(tiny_albef(**changed), pairs_loader(8, 4), ckpt_path=checkpoint)
    assert str(raised.value) == (
        "The checkpoint does not fit ALBEFModule: contrast.embed_dim is 16, in the checkpoint 8; give what it was "
        "trained with."
    )


def test_a_checkpoint_of_another_class_is_named(tmp_path: Path, checkpoint: str):
    said = (
        "^Expected a checkpoint of CoCoRDModule, got one of ALBEFModule: give another checkpoint, or use ALBEFModule.$"
    )
    alone = {"contrast": {"weight": 0.0}, "prediction": {"weight": 0.0}}
    module = CoCoRDModule("resnet8", 4, **alone)
    with pytest.raises(UserError, match=said):
        trainer(tmp_path).validate(module, pairs_loader(8, 4), ckpt_path=checkpoint, verbose=False)
    with pytest.raises(UserError, match=said):
        CoCoRDModule.load_from_checkpoint(checkpoint, student="resnet8", num_classes=4, **alone)


def test_fitting_weights_are_loaded_if_other_settings_differ(tmp_path: Path, checkpoint: str):
    loaded = ALBEFModule.load_from_checkpoint(checkpoint, optim={"learning_rate": 0.5})
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        tiny_albef().load_state_dict({})  # of no checkpoint: torch's own words


def test_the_command_line_names_the_argument_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str):
    monkeypatch.chdir(tmp_path)
    sizes = [f"--data.{name}=8" for name in ("length", "eval_length")]
    words = ("--data=ShapesDataModule", "--data.num_workers=0", *sizes, "--trainer.accelerator=cpu")
    settings = flat(SIZES)
    model = [f"--model.{name}={value}" for name, value in settings.items() if name not in LINKED]
    linked = [f"--data.{name.partition('.')[2]}={settings[name]}" for name in LINKED]
    other = ("--model=ALBEFModule", *model, *linked, "--model.text.ffn_width=64")
    ran = run("test", f"--ckpt_path={checkpoint}", *words, *other)
    assert ran.status == 1
    assert "text.ffn_width is 64, in the checkpoint 32" in ran.sentence
    assert not Path("runs").exists()


LINKED = ("vision.image_size", "text.vocab_size")
