"""The folder of `save_pretrained`, of every method; ALBEF's is also tested in `albef/test_folder.py`."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors import safe_open
from transformers import AutoTokenizer

from support.methods.methods import METHODS, OTHERS
from support.runs.command_line import run
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import FinalExport
from vlightning.commands.export.layouts import export
from vlightning.common.errors import UserError
from vlightning.lightning_modules import ALBEFModule, SHReModule


@pytest.mark.parametrize("name", METHODS)
def test_a_module_is_rebuilt_from_its_folder(name, tmp_path):
    method = METHODS[name]
    module, _ = method.build(method.prepare(tmp_path), seed=0)
    module.save_pretrained(tmp_path / "export")
    torch.manual_seed(1)
    loaded = type(module).from_pretrained(tmp_path / "export")
    assert not loaded.training
    state, own = (each.pretrained_state(each.state_dict()) for each in (module, loaded))
    assert state.keys() == own.keys()
    assert all(torch.equal(value, own[key]) for key, value in state.items())
    assert not any(key.startswith(method.outside) for key in state if method.outside)


def test_the_folder_of_another_class_is_refused(tmp_path):
    method = METHODS["shre"]
    method.build(method.prepare(tmp_path), seed=0)[0].save_pretrained(tmp_path / "export")
    with pytest.raises(UserError, match=r"Expected an export of ALBEFModule in .* got one of SHReModule"):
        ALBEFModule.from_pretrained(tmp_path / "export")
    with pytest.raises(UserError, match="got one of SHReModule"):
        type("Other", (SHReModule,), {}).from_pretrained(tmp_path / "export")


def exported(name, folder, fitted, **data):
    """Train one step, and compare the folder of `FinalExport` with the state before."""
    method = METHODS[name]
    module, data = method.build(method.prepare(Path(folder)), seed=0, batch_size=4, num_workers=0, **data)
    fitted.callbacks.append(FinalExport(f"{folder}/export"))
    fitted.fit(module, data)
    return module


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"mobileclip"}))
def test_final_export_writes_the_trained_module_with_its_tokenizer(name, tmp_path):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, **quiet)
    module = exported(name, tmp_path, trainer)
    loaded = type(module).from_pretrained(tmp_path / "export")
    own = module.pretrained_state(module.state_dict())
    assert all(torch.equal(value, own[key]) for key, value in loaded.pretrained_state(loaded.state_dict()).items())
    if name in ("albef", "shre"):
        text = ["a red circle"]
        ids = AutoTokenizer.from_pretrained(tmp_path / "export")(text)["input_ids"]
        assert ids == trainer.datamodule.tokenizer(text)["input_ids"]


def checkpointed(module):
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def export_of_two(kind, name, folder):
    trainer = rank_trainer(kind, max_steps=1, limit_val_batches=0, use_distributed_sampler=False)
    module = exported(name, folder, trainer)
    assert checkpointed(module)["module_class"] == {"albef": "ALBEFModule", "shre": "SHReModule"}[name]
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize(("kind", "name"), [("sharded", "albef"), ("sharded", "shre"), ("ddp", "shre")])
def test_two_processes_export_the_whole_module(kind, name, tmp_path):
    state, _ = run_distributed(export_of_two, kind, name, str(tmp_path))
    loaded = {"albef": ALBEFModule, "shre": SHReModule}[name].from_pretrained(tmp_path / "export")
    found = loaded.pretrained_state(loaded.state_dict())
    assert found
    assert all(torch.equal(value, state[key]) for key, value in found.items())


def trained(name, folder):
    """A module after a fit whose trainer is gone, and its checkpoint in a run's folder."""
    method = (METHODS | OTHERS)[name]
    module, data = method.build(method.prepare(folder), seed=0, batch_size=4, num_workers=0)
    fitted = Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, logger=False, enable_progress_bar=False)
    fitted.fit(module, data)
    (folder / "run/checkpoints").mkdir(parents=True)
    fitted.save_checkpoint(folder / "run/checkpoints/last.ckpt")
    (folder / "run/environment.json").write_text('{"git": {"commit": "abc"}}')
    return module


@pytest.mark.parametrize("name", ["albef", "clip", "shre"])
def test_every_way_writes_weights_preprocessing_tokenizer_and_card(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = trained(name, tmp_path)
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    assert run("export", checkpoint, "typed", "--layout", "vlightning").status == 0
    export(str(checkpoint), "called", "vlightning")
    loaded = type(module).load_from_checkpoint(checkpoint)
    loaded.save_pretrained("loaded")
    module.save_pretrained("fitted")
    type(module).from_pretrained("typed").save_pretrained("again")
    files = {path.name: path.read_bytes() for path in Path("typed").iterdir()}
    assert files.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    config = json.loads(files["config.json"])
    assert config["preprocessing"]["image_size"] == module.expected_image_size()
    assert config["data"]["max_tokens"]
    for way in ("called", "loaded", "fitted", "again"):
        written = {path.name: path.read_bytes() for path in Path(way).iterdir()}
        assert written.keys() == files.keys(), way
        for file in files.keys() - {"README.md"}:
            assert written[file] == files[file], f"{file} of {way}"
        card = Path(way, "README.md").read_text()
        assert card.splitlines()[12] == files["README.md"].decode().splitlines()[12]  # the number of parameters
        assert way == "again" or "| steps | 2 |" in card
        assert way in ("again", "fitted") or "| commit | abc |" in card


def content(path):
    """Bytes of a file; of safetensors its metadata, which have no order, and the bytes of its tensors."""
    if path.suffix not in (".safetensors", ""):  # a learngene has no suffix here
        return path.read_bytes()
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
        return file.metadata(), [(name, file.get_tensor(name).numpy().tobytes()) for name in names]


LAYOUTS = {"albef": "transformers", "clip": "open_clip", "cocord": "student", "mmlg": "learngene"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_writes_the_layouts_of_its_checkpoint(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = trained(name, tmp_path)
    suffix = {"student": ".safetensors"}.get(LAYOUTS[name], "")
    export("run/checkpoints/last.ckpt", f"typed{suffix}", LAYOUTS[name])
    module.export(f"fitted{suffix}", LAYOUTS[name])
    type(module).load_from_checkpoint("run/checkpoints/last.ckpt").export(f"loaded{suffix}", LAYOUTS[name])
    typed = Path(f"typed{suffix}")
    files = [path for path in (typed.rglob("*") if typed.is_dir() else [typed]) if path.is_file()]
    assert files
    for way in ("fitted", "loaded"):
        for path in files:
            written = Path(str(path).replace("typed", way, 1))
            assert content(written) == content(path), f"{path} of {way}"
    with pytest.raises(UserError, match=r"Expected .* as the layout of .*, got 'none'"):
        module.export("other", "none")
