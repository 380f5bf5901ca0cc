"""What `--help` shows: this package's arguments, all of them, and no other package's classes."""

import inspect
import re

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

import vlightning.callbacks
import vlightning.datamodules
import vlightning.lightning_modules
from support.runs.command_line import run
from vlightning.commands.cli.checkpoints import BestCheckpoint, LastCheckpoint
from vlightning.commands.cli.help import HelpfulParser

# How the description of an argument begins that cannot be understood without its name.
FRAGMENT = re.compile(
    r"(of|at|to|with|in|by|and|whose|peak(?! learning rate)|the same|see there|which|who)\b", re.IGNORECASE
)
OTHERS = re.compile(r"\b(torch|torchvision|timm|transformers|torchmetrics|open_clip|lightning)\.\w+\.\w+")


def exported(package: object, base: type) -> list[type]:
    return [cls for cls in vars(package).values() if inspect.isclass(cls) and issubclass(cls, base)]


MODELS = exported(vlightning.lightning_modules, LightningModule)
DATA = exported(vlightning.datamodules, LightningDataModule)
CALLBACKS = exported(vlightning.callbacks, Callback)


def arguments(cls: type) -> list[str]:
    return [name for name, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD]


@pytest.mark.parametrize("cls", [*MODELS, *DATA, *CALLBACKS], ids=lambda cls: cls.__name__)
def test_the_help_of_a_class_holds_its_arguments_and_little_else(cls: type):
    parser = HelpfulParser(exit_on_error=False)
    parser.add_class_arguments(cls, "data" if cls in DATA else "model" if cls in MODELS else "trainer.callbacks")
    parser._inner_parser = True
    shown = parser.format_help()
    for name in arguments(cls):
        assert re.search(rf"^  --[\w.]+\.{name}\b", shown, re.MULTILINE), name
    assert not [f"{action.dest}: {action.help}" for action in parser._actions if FRAGMENT.match(action.help or "")]
    assert not OTHERS.findall(shown)
    assert "``" not in shown
    assert ":class:" not in shown
    # Arguments behind `**kwargs` and fields of groups are options too.
    assert len(shown.splitlines()) < 20 + 8 * len(parser._actions)


def test_the_help_that_the_readme_names_is_short_from_the_command_line():
    ran = run("fit", "--data.help", "ImageTextDataModule")
    assert ran.status == 0
    assert "--data.caption_column" in ran.out
    assert not OTHERS.findall(ran.out)
    assert len(ran.out.splitlines()) < 220


def test_the_help_of_fit_names_every_class_and_every_argument_in_a_sentence():
    ran = run("fit", "--help")
    assert ran.status == 0
    assert len(ran.out.splitlines()) < 350
    words = set(re.findall(r"[\w.]+", ran.out))
    assert {cls.__name__ for cls in (*MODELS, *DATA, *CALLBACKS)} <= words
    for section, cls in (("trainer", Trainer), ("checkpoint", BestCheckpoint), ("last_checkpoint", LastCheckpoint)):
        assert {f"{section}.{name}" for name in arguments(cls)} <= words
    assert ran.out.index("--model ") < ran.out.index("--trainer.max_epochs")
    assert set(OTHERS.findall(ran.out.replace("lightning.pytorch.loggers.TensorBoardLogger", ""))) <= {"torch"}
    assert "<class" not in ran.out


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (("--model.help", "ALBEF"), "did you mean 'ALBEFModule'?"),
        (("--model.help=ALBEFModul",), "did you mean 'ALBEFModule'?"),
        (("--model.help", "nowhere.Nope"), "the module 'nowhere' cannot be imported."),
        (("--trainer.callbacks.help", "EMACalback"), "did you mean 'EMACallback'?"),
    ],
    ids=" ".join,
)
def test_the_help_of_a_class_that_does_not_exist_says_what_does(words: tuple[str, ...], end: str):
    ran = run("fit", *words)
    assert ran.status == 2
    assert ran.sentence.startswith("Expected a class for ")
    assert end in ran.sentence


def test_help_without_a_class_asks_for_one():
    assert run("fit", "--data.help").sentence.startswith("Expected the name of a class after --data.help")
