"""A checkpoint names no code but this package's, `torch.optim`'s, and what the user typed; nothing else is imported."""

import copy
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from torch import nn

from support.runs.command_line import run, tiny_config
from vlightning import callbacks, datamodules, lightning_modules
from vlightning.commands.cli.command_line import read_command_line
from vlightning.commands.cli.saved_run import merge, read_saved_run
from vlightning.common.checked_loading import instantiate
from vlightning.common.class_arguments import parameters
from vlightning.common.errors import UserError
from vlightning.common.named_code import INSTANTIATORS, ForeignCode, TypedNames, check_arguments
from vlightning.common.tokenizers import open_tokenizer
from vlightning.datamodules import ImageTextDataModule, ShapesDataModule
from vlightning.lightning_modules import ALBEFModule, CoCoRDModule, MobileCLIPModule

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
        *("data", "eval_transform", call("vlightning.commands.cli.run_folder.os.system", command=TOUCH)),
        "vlightning.commands.cli.run_folder.os.system",
    ),
    "re-export of this package": (
        "data",
        "eval_transform",
        call("vlightning.commands.cli.saved_run.Path"),
        "vlightning.commands.cli.saved_run.Path",
    ),
    "function of this package": (
        *("data", "eval_transform", call("vlightning.commands.export.layouts.export", checkpoint="a", target="ran")),
        "vlightning.commands.export.layouts.export",
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
    "a file for a group of settings": ("model", "optim", "gadget.yaml", "gadget.yaml"),
    "a class for a group of settings": ("model", "optim", "gadget.Gadget", "gadget.Gadget"),
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
        *(("fit", what) for what in ("a file for a group of settings", "a class for a group of settings")),
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


@pytest.mark.slow
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


Place = tuple[str, Any, Callable[[Any], Any]]
"""Name of a place in the arguments of a class, its type, and a function that puts a value there."""


def options(hint: Any) -> list[Any]:
    return [part for kind in get_args(hint) for part in options(kind)] if is_union(hint) else [hint]


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def places_below(name: str, hint: Any, put: Callable[[Any], Any]) -> Iterator[Place]:
    """Yield a place, and those in its groups of settings, lists and dictionaries."""
    yield name, hint, put
    for option in options(hint):
        if is_dataclass(option):
            hints = get_type_hints(option)
            for field in (field.name for field in fields(option)):
                yield from places_below(f"{name}.{field}", hints[field], lambda value, at=field: put({at: value}))
        elif get_origin(option) is dict:
            yield from places_below(f"{name}.key", get_args(option)[1], lambda value: put({"key": value}))
        elif get_origin(option) is not None and get_origin(option) is not Literal and not callable_type(option):
            for kind in get_args(option):
                if kind is not Ellipsis:
                    yield from places_below(f"{name}.0", kind, lambda value: put([value]))


def callable_type(hint: Any) -> bool:
    return "Callable" in str(get_origin(hint))


def places() -> Iterator[tuple[type, Place]]:
    """Yield each place in the constructors of all public modules, datamodules and callbacks."""
    for package in (lightning_modules, datamodules, callbacks):
        for public in (getattr(package, name) for name in package.__all__):
            if isinstance(public, type):
                for argument, hint in parameters(public).items():
                    for name, kind, put in places_below(argument, hint, lambda value, at=argument: {at: value}):
                        yield public, (f"{public.__name__}.{name}", kind, put)


def takes_text(hint: Any) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, (str, os.PathLike)) for kind in options(hint))


def has_code(hint: Any) -> bool:
    """Whether a value of the type may be a class, a function or a group of settings."""
    if get_origin(hint) is Literal or hint is Ellipsis or hint in (str, int, float, bool, bytes, type(None), Path):
        return False
    return not get_args(hint) or callable_type(hint) or any(has_code(kind) for kind in get_args(hint))


FILES = ("gadget.yaml", "./gadget.yaml", "gadget.Gadget", "test.parquet", "os.system", "2001-99-99", "{a: [")
"""Names of files and of classes: text where the type is text."""
FOREIGN = (call("gadget.Gadget"), call("os.system", command=TOUCH), {"class_path": "gadget.yaml"})


@pytest.mark.slow
def test_each_place_of_all_public_constructors_refuses_files_and_classes_unless_its_type_is_text():
    """Files of settings and foreign classes at every place, by the type of the place."""
    counts = {"text": 0, "code": 0, "other": 0}
    texts: list[Any] = []
    for public, (name, hint, put) in places():

        def check(value: Any, public: type = public, put: Callable[[Any], Any] = put) -> Any:
            return check_arguments(put(value), public, TypedNames())

        for foreign in FOREIGN:
            for value in (foreign, [foreign], {"key": foreign}):
                with pytest.raises(ForeignCode):
                    raise AssertionError(f"{name} takes {check(value)}")
        kind = "text" if takes_text(hint) else "code" if has_code(hint) and hint is not Any else "other"
        counts[kind] += 1
        for text in (*FILES, str(Path("gadget.yaml").resolve())):
            if kind == "code":
                with pytest.raises(ForeignCode):
                    raise AssertionError(f"{name} takes {check(text)}")
            else:
                assert check(text) == put(text), name
        if has_code(hint):
            for foreign in FOREIGN:
                with pytest.raises(ForeignCode):
                    raise AssertionError(f"{name} takes {check(yaml.safe_dump(foreign))}")
        if kind == "text" and hint not in texts:
            texts.append(hint)
        assert nothing_ran(), name
    assert min(counts.values()) > 0
    assert counts["text"] > 400
    assert counts["code"] > 100
    for hint in texts:  # what was let through is text for the parser too

        class Holder:
            def __init__(self, value) -> None:
                self.value = value

        Holder.__init__.__annotations__["value"] = hint
        for text in FILES:
            assert instantiate(Holder, {"value": text}).value == text, hint
        assert nothing_ran(), hint


def saved_by_the_command_line(key: str = "hyper_parameters", **values: Any) -> str:
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 0, "loops": {}}
    torch.save(content | {key: {"_instantiator": INSTANTIATORS[0], **values}}, "saved.ckpt")
    return "saved.ckpt"


@pytest.mark.parametrize("key", ["hyper_parameters", "hparams", "module_arguments"])
@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (ALBEFModule, {"optim": "gadget.yaml"}),
        (CoCoRDModule, {"student": "resnet8", "num_classes": 4, "teacher": "gadget.yaml"}),
        (CoCoRDModule, {"student": "resnet8", "num_classes": 4, "teacher": {"network": "gadget.yaml"}}),
        (MobileCLIPModule, {"model": "MobileCLIP-tiny", "teacher": {"models": ["gadget.yaml"]}}),
        (MobileCLIPModule, {"model": "MobileCLIP-tiny", "teacher": {"models": "gadget.yaml"}}),
        (ALBEFModule, {"optimizer": "gadget.yaml"}),
    ],
)
def test_load_from_checkpoint_opens_no_file_that_a_checkpoint_names(key: str, cls: type, values: dict[str, Any]):
    with pytest.raises(UserError, match=r"got 'gadget\.yaml' for \S+, which could run any code"):
        cls.load_from_checkpoint(saved_by_the_command_line(key, **values))  # type: ignore[attr-defined]
    assert nothing_ran()


def test_a_file_named_like_an_own_class_is_not_opened():
    Path("ALBEFEvalTransform").write_text("class_path: gadget.Gadget\n")
    Path(OWN).write_text("class_path: gadget.Gadget\n")
    for name in ("ALBEFEvalTransform", OWN):
        with pytest.raises(UserError, match="could run any code"):
            ShapesDataModule.load_from_checkpoint(
                saved_by_the_command_line("datamodule_hyper_parameters", eval_transform=name)
            )
    assert nothing_ran()


def test_the_name_of_a_data_file_is_text_whatever_it_says():
    """Python has a package `test`; the content of a file does not replace its name."""
    Path("test.parquet").write_text("class_path: gadget.Gadget\n")
    sources = {
        "train": "test.parquet",
        "test": ["test.parquet", {"path": "gadget.Gadget"}],
        "image_root": "gadget.yaml",
    }
    path = saved_by_the_command_line("datamodule_hyper_parameters", **sources)
    data = ImageTextDataModule.load_from_checkpoint(path)
    assert (data.hparams["train"], data.hparams["image_root"]) == ("test.parquet", "gadget.yaml")
    assert data.hparams["test"][0] == "test.parquet"
    described = {"_class_path": "vlightning.datamodules.ImageTextDataModule", **sources}
    content = torch.load(checkpoint(), weights_only=True) | {"datamodule_hyper_parameters": described}
    torch.save(content, "data.ckpt")
    ran = run("test", "--ckpt_path", "data.ckpt", "--print_config")
    assert ran.status == 0, ran.err
    assert yaml.safe_load(ran.out)["data"]["init_args"]["train"] == "test.parquet"
    assert nothing_ran()


def test_the_content_of_a_typed_data_file_does_not_allow_its_name_as_a_class():
    Path("gadget.Gadget").write_text("class_path: gadget.Gadget\n")
    path = checkpoint("data", "eval_transform", "gadget.Gadget")
    ran = run("test", "--ckpt_path", path, "--data.train_transform", "null", "--trainer.default_root_dir=gadget.Gadget")
    assert "could run any code" in ran.sentence
    assert nothing_ran()
