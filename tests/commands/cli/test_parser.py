"""What names a file reaches the class as it was typed, although the file could be read in its place."""

import dataclasses
import inspect
import json
from typing import Any, get_args, get_origin

import pytest
import yaml
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn

import vlightning.callbacks
import vlightning.datamodules
import vlightning.lightning_modules
from vlightning.commands.cli.help import HelpfulParser
from vlightning.common.class_arguments import members

FILES = {
    "list.json": json.dumps([{"image": "0.png", "caption": "a"}, {"image": "1.png", "caption": "b"}]),
    "object.json": json.dumps({"path": "elsewhere.csv"}),
    "text.csv": "image,caption\n0.png,a\n",
}
STAND_INS = {int: 1, float: 0.5, list[int]: [1], LightningDataModule: {"class_path": "ShapesDataModule"}}
"""For required arguments that take no text."""


def hints(cls: type) -> dict[str, Any]:
    """The types of a class's arguments, as the parser sees them."""
    parser = HelpfulParser(exit_on_error=False)
    parser.add_class_arguments(cls, "it", fail_untyped=False)
    found = {action.dest: getattr(action, "_typehint", action.type) for action in parser._actions}
    return {dest[3:]: hint for dest, hint in found.items() if dest.startswith("it.") and "." not in dest[3:]}


def text_arguments(cls: type) -> dict[str, Any]:
    """Those of them that take text, and so the name of a file, alone or in lists."""
    return {name: hint for name, hint in hints(cls).items() if str in members(hint)}


def can_be_named(cls: Any) -> bool:
    """Whether a config can name it: no function or record, nor a base whose arguments its subclasses fill in."""
    if not inspect.isclass(cls) or not issubclass(cls, (nn.Module, Callback, LightningDataModule, Strategy)):
        return False
    parameters = inspect.signature(cls).parameters.values()
    return not any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)


PACKAGES = (vlightning.callbacks, vlightning.datamodules, vlightning.lightning_modules)
NAMED = [cls for package in PACKAGES for name in package.__all__ if can_be_named(cls := getattr(package, name))]
CLASSES = [cls for cls in NAMED if text_arguments(cls)]


def alone(hint: Any, file: str) -> Any:
    """The file, in a list only where the argument takes nothing else."""
    return [file] if get_origin(hint) is list or str not in (hint, *get_args(hint)) else file


def in_list(hint: Any, file: str) -> Any:
    """The file in a list, beside a mapping with the file, as far as the argument takes such."""
    if not any(get_origin(member) is list for member in (hint, *get_args(hint))):
        return file
    return [file, *({"path": file, "image_root": file} for cls in members(hint)[-1:] if dataclasses.is_dataclass(cls))]


def parsed(cls: type, *words: str) -> dict[str, Any]:
    """What the class is given."""
    parser = HelpfulParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(cls, "it", fail_untyped=False)
    return parser.parse_args(list(words)).it.init_args.as_dict()


def holds(found: Any, given: Any) -> bool:
    """Whether what was parsed is what was given; a mapping may have defaults too."""
    if isinstance(given, dict):
        return all(holds(found[name], value) for name, value in given.items())
    if isinstance(given, list):
        return isinstance(found, list) and len(found) == len(given) and all(map(holds, found, given))
    return found == given


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, content in FILES.items():
        (tmp_path / file).write_text(content)


def as_options(given: dict[str, Any]) -> list[str]:
    return [f"--it.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]


def as_yaml(cls: type, given: dict[str, Any]) -> str:
    with open("run.yaml", "w") as file:
        yaml.safe_dump({"it": {"class_path": cls.__name__, "init_args": given}}, file)
    return "--config=run.yaml"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_name_of_a_file_stays_a_name(cls, files):
    texts, arguments = text_arguments(cls), hints(cls)
    needed = [name for name, p in inspect.signature(cls).parameters.items() if p.default is p.empty]
    others = {name: STAND_INS[arguments[name]] for name in needed if name in arguments and name not in texts}

    given = {name: alone(hint, "text.csv") for name, hint in texts.items()}
    assert holds(parsed(cls, f"--it={cls.__name__}", *as_options(given | others)), given)
    given = {name: alone(hint, "list.json") for name, hint in texts.items()}
    assert holds(parsed(cls, as_yaml(cls, given | others)), given)
    given = {name: in_list(hint, "object.json") for name, hint in texts.items()}
    assert holds(parsed(cls, as_yaml(cls, given | others)), given)


@pytest.mark.parametrize("file", FILES)
def test_a_source_in_every_form(file, files):
    cls = vlightning.datamodules.ImageTextDataModule
    split = {"path": file, "split": "train+val"}
    for source in (file, [file], split, [split], [file, split]):
        assert holds(parsed(cls, f"--it={cls.__name__}", *as_options({"train": source})), {"train": source})
        assert holds(parsed(cls, as_yaml(cls, {"train": source})), {"train": source})
    words = (f"--it.train.path={file}", "--it.train.split=train+val")
    assert holds(parsed(cls, f"--it={cls.__name__}", *words), {"train": split})
    words = (f"--it.train={file}", f"--it.train+={file}")
    assert holds(parsed(cls, f"--it={cls.__name__}", *words), {"train": [file, file]})


def test_what_takes_no_text_is_still_read_from_a_file(files):
    cls = vlightning.lightning_modules.ReinforcementModule
    with open("teachers.yaml", "w") as file:
        yaml.safe_dump([{"weights": "list.json"}], file)
    words = (f"--it={cls.__name__}", "--it.teachers=teachers.yaml")
    assert holds(parsed(cls, *words), {"teachers": [{"weights": "list.json"}]})


def test_a_strategy_keeps_its_name_beside_a_file_that_has_it(files, tmp_path):
    (tmp_path / "ddp").write_text("something else")
    parser = HelpfulParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    assert parser.parse_args(["--trainer.strategy=ddp"]).trainer.strategy == "ddp"
