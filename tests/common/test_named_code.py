"""A checkpoint names no code but this package's, `torch.optim`'s, and what the user typed; nothing else is imported."""

import copy
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.command_line import run, tiny_config
from vlightning.callbacks.checkpoints.resume import merge
from vlightning.callbacks.checkpoints.saved_run import read_saved_run
from vlightning.cli_support.command_line import read_command_line
from vlightning.common.errors import UserError
from vlightning.common.named_code import ForeignCode, TypedNames, check_arguments
from vlightning.datamodules import ImageTextDataModule, ShapesDataModule
from vlightning.datamodules.text.tokenizers import open_tokenizer
from vlightning.lightning_modules import ALBEFModule

SIZES = {
    "_class_path": "vlightning.lightning_modules.ALBEFModule",
    "vision": {"depth": 1},
    "contrast": {"queue_size": 8},
    "text": {"vocab_size": 200},
}
DATA = {"_class_path": "vlightning.datamodules.ShapesDataModule", "length": 8, "num_workers": 0}
TOUCH = "touch ran"
OWN = "vlightning.datamodules.ALBEFEvalTransform"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


# A name of code, its place, and the part of it in the message. Each would write the file `ran`.
GADGETS = {
    "function": ("data", "eval_transform", call("os.system", command=TOUCH), "os.system"),
    "class": ("data", "eval_transform", call("subprocess.Popen", args=TOUCH, shell=True), "subprocess.Popen"),
    "function that makes modules": (
        *("data", "eval_transform"),
        *(call("open_clip.create_model", model_name="RN50", pretrained="evil.pth"), "open_clip.create_model"),
    ),
    "imports of this package": (
        *("data", "eval_transform", call("vlightning.cli_support.run_folder.os.system", command=TOUCH)),
        "vlightning.cli_support.run_folder.os.system",
    ),
    "re-export of this package": (
        "data",
        "eval_transform",
        call("vlightning.cli_support.commands.Path"),
        "vlightning.cli_support.commands.Path",
    ),
    "function of this package": (
        *("data", "eval_transform", call("vlightning.lightning_modules.exports.export", checkpoint="a", target="ran")),
        "vlightning.lightning_modules.exports.export",
    ),
    "a similar prefix": (
        "data",
        "eval_transform",
        call("vlightning_evil.Gadget"),
        "vlightning_evil.Gadget",
    ),
    "not imported yet": ("data", "eval_transform", call("gadget.Gadget"), "gadget.Gadget"),
    "a string alone": ("data", "eval_transform", "gadget.Gadget", "gadget.Gadget"),
    "YAML in a string": ("data", "eval_transform", '{"class_path": "gadget.Gadget"}', "gadget.Gadget"),
    "a file": ("data", "eval_transform", "gadget.yaml", "gadget.yaml"),
    "inside an own class": ("data", "eval_transform", call(OWN, size=call("gadget.Gadget")), "gadget.Gadget"),
    "dict_kwargs": (
        *("data", "eval_transform"),
        *({"class_path": OWN, "dict_kwargs": {"x": call("gadget.Gadget")}}, "gadget.Gadget"),
    ),
    "a dotted key": ("data", "eval_transform.class_path", "gadget.Gadget", "eval_transform.class_path"),
    "a number's place": ("data", "length", call("gadget.Gadget"), "gadget.Gadget"),
    "the model's argument": ("model", "weights", call("gadget.Gadget"), "gadget.Gadget"),
    "the model's class": ("model", "_class_path", "gadget.Gadget", "gadget.Gadget"),
    "another ALBEFModule": ("model", "_class_path", "gadget.ALBEFModule", "gadget.ALBEFModule"),
    "the data's class": ("data", "_class_path", "gadget.Gadget", "gadget.Gadget"),
    "the instantiator": ("model", "_instantiator", "gadget.instantiate", "gadget.instantiate"),
    "the data's instantiator": ("data", "_instantiator", "os.system", "os.system"),
}


class Bomb:
    """Writes the file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (TOUCH,)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with modules on the path that write the file when they are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("gadget", "vlightning_evil"):
        Path(f"{name}.py").write_text(
            "open('ran', 'w').close()\nfrom torch import nn\nfrom vlightning.lightning_modules import ALBEFModule\n"
            "class Gadget(nn.Identity): pass\ndef instantiate(*_): open('ran', 'w').close()\n"
        )
    Path("gadget.yaml").write_text("class_path: gadget.Gadget\n")
    torch.save({"state_dict": Bomb()}, "evil.pth")
    yield
    for name in ("gadget", "vlightning_evil"):
        sys.modules.pop(name, None)


def checkpoint(section: str = "", argument: str = "", value: Any = None) -> str:
    parts = {"model": dict(SIZES), "data": dict(DATA)}
    if section:
        parts[section][argument] = value
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 0, "loops": {}}
    content |= {"hyper_parameters": parts["model"], "datamodule_hyper_parameters": parts["data"], "callbacks": {}}
    torch.save(content, "evil.ckpt")
    return "evil.ckpt"


def nothing_ran() -> bool:
    return not Path("ran").exists() and "gadget" not in sys.modules and "vlightning_evil" not in sys.modules


# Building the parser takes a second: the rest is below without it.
@pytest.mark.parametrize(
    ("subcommand", "what"),
    [
        *(("test", what) for what in ("function that makes modules", "imports of this package", "dict_kwargs")),
        *(("test", what) for what in ("not imported yet", "a file", "a dotted key", "the data's instantiator")),
        *(("fit", what) for what in ("function", "class", "YAML in a string", "the model's class")),
    ],
)
def test_the_command_line_refuses_a_checkpoint_that_names_other_code(subcommand: str, what: str):
    section, argument, value, named = GADGETS[what]
    ran = run(subcommand, "--ckpt_path", checkpoint(section, argument, copy.deepcopy(value)))
    assert ran.status == 2
    assert named in ran.sentence
    assert "could run any code" in ran.sentence
    assert nothing_ran()
    assert not Path("runs").exists()


@pytest.mark.parametrize("what", GADGETS)
def test_foreign_names_do_not_reach_the_parser(what: str):
    section, argument, value, named = GADGETS[what]
    path = Path(checkpoint(section, argument, copy.deepcopy(value)))
    with pytest.raises(UserError, match=f"{re.escape(named)}.*could run any code"):
        merge(read_saved_run(path), read_command_line(["test", f"--ckpt_path={path}"]))
    assert nothing_ran()


def test_a_class_of_the_same_name_as_the_typed_one_is_not_imported():
    ran = run("test", "--ckpt_path", checkpoint("model", "_class_path", "gadget.ALBEFModule"), "--model=ALBEFModule")
    assert ran.status == 2
    assert nothing_ran()


def test_typed_names_are_allowed_and_replace_foreign_ones():
    """Both solutions that the message names."""
    named = checkpoint("data", "eval_transform", call("gadget.Gadget"))
    ran = run("test", "--ckpt_path", named, "--data.init_args.eval_transform=gadget.Gadget", "--print_config")
    assert ran.status == 0, ran.err
    assert "class_path: gadget.Gadget" in ran.out
    ran = run("test", "--ckpt_path", named, f"--data.eval_transform={OWN}", "--print_config")
    assert ran.status == 0, ran.err
    assert "gadget" not in ran.out
    ran = run("test", "--ckpt_path", named, "--config", tiny_config(Path(), text="data: {class_path: TinyData}"))
    assert "could run any code" not in ran.err  # another datamodule: its arguments are not used


def test_names_are_compared_by_the_object():
    good = [OWN, "vlightning.datamodules.transforms.classification.ALBEFEvalTransform", "ALBEFEvalTransform"]
    names = {
        check_arguments({"eval_transform": name}, ShapesDataModule, TypedNames())["eval_transform"]
        for name in good
        if getattr(sys.modules.get(name.rpartition(".")[0]), "ALBEFEvalTransform", None) or "." not in name
    }
    assert len(names) == 1


def test_optimizers_of_torch_are_allowed_and_functions_are_refused():
    class Own(nn.Module):
        def __init__(self, optimizer: "OptimizerCallable", schedule: "LRSchedulerCallable") -> None:
            super().__init__()

    from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

    Own.__init__.__annotations__ |= {"optimizer": OptimizerCallable, "schedule": LRSchedulerCallable}
    good = {"optimizer": call("torch.optim.SGD", lr=0.1), "schedule": "torch.optim.lr_scheduler.ExponentialLR"}
    checked = check_arguments(good, Own, TypedNames())
    assert checked["optimizer"] == call("torch.optim.sgd.SGD", lr=0.1)
    for bad in (
        {"optimizer": "os.system"},
        {"optimizer": "torch.optim.swa_utils.AveragedModel"},
        {"optimizer": "torch.optim.sgd.sgd"},
        {"schedule": call("torch.optim.lr_scheduler.LambdaLR", lr_lambda="os.system")},
        {"schedule": call("torch.optim.lr_scheduler.types.FunctionType")},
    ):
        with pytest.raises(ForeignCode):
            check_arguments(bad, Own, TypedNames())


@pytest.mark.parametrize("what", [name for name, gadget in GADGETS.items() if gadget[0] == "data"])
def test_load_from_checkpoint_refuses_foreign_code(what: str):
    _, argument, value, _ = GADGETS[what]
    path = checkpoint("data", argument, copy.deepcopy(value))
    content = torch.load(path, weights_only=True)
    content["datamodule_hyper_parameters"].setdefault("_instantiator", "lightning.pytorch.cli.instantiate_module")
    torch.save(content, path)
    with pytest.raises((UserError, ValueError), match=r"could run any code|arbitrary code|Expected a checkpoint of"):
        ShapesDataModule.load_from_checkpoint(path)
    assert nothing_ran()


def test_load_from_checkpoint_accepts_a_passed_argument_or_a_trusted_file():
    path = checkpoint("data", "eval_transform", call("torch.nn.Identity"))
    content = torch.load(path, weights_only=True)
    content["datamodule_hyper_parameters"]["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    torch.save(content, path)
    with pytest.raises(UserError, match=r"'torch\.nn\.Identity' for eval_transform.*pass eval_transform="):
        ShapesDataModule.load_from_checkpoint(path)
    mine = nn.Identity()
    assert ShapesDataModule.load_from_checkpoint(path, eval_transform=mine).eval_transform is mine
    assert isinstance(ShapesDataModule.load_from_checkpoint(path, weights_only=False).eval_transform, nn.Identity)
    with pytest.raises(UserError, match=r"Expected a checkpoint of ImageTextDataModule, got .* of ShapesDataModule"):
        ImageTextDataModule.load_from_checkpoint(path)
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        ALBEFModule.load_from_checkpoint("evil.pth")
    assert nothing_ran()


def test_a_tokenizers_folder_does_not_run_its_own_python_files(monkeypatch: pytest.MonkeyPatch):
    """Without a decision, transformers asks at the terminal; the answer in this test is yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = Path("own")
    folder.mkdir()
    Path("own/own.py").write_text(f"open({str(Path('ran').resolve())!r}, 'w').close()\nclass Own: pass\n")
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps(named | {"auto_map": {"AutoConfig": "own.Own"}}))
    with pytest.raises(UserError, match="contains custom code"):
        open_tokenizer("own")
    assert nothing_ran()
