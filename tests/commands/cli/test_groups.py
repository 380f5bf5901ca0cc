"""Groups of settings: a module whose constructor takes frozen dataclasses, through the real command line."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from support.methods.tiny import TinyModel
from support.runs.command_line import run, tiny_config

CONFIG = """\
model: {class_path: GroupedModel, init_args: {vision: {width: 5}, kind: fancy}}
data: {class_path: TinyData, init_args: {batch_size: 8}}
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""
CHECKPOINT = "runs/grouped/version_0/checkpoints/last.ckpt"


@dataclass(frozen=True)
class Vision:
    """Image encoder.

    Args:
        width: Embedding dimension.
        image_size: Side of an image.
        weights: File with initial weights.
        rates: Two rates.
    """

    width: int = 4
    image_size: int = 224
    weights: str | None = None
    rates: tuple[float, float] = (0.1, 0.2)


@dataclass(frozen=True)
class Text:
    """Text encoder.

    Args:
        vocab_size: Number of tokens.
        learning_rate: Learning rate.
    """

    vocab_size: int = 10
    learning_rate: float = 0.1


class GroupedModel(TinyModel):
    """Has its settings in groups.

    Args:
        vision: Settings of the image encoder.
        text: Settings of the text encoder.
        teacher: Settings of the teacher's image encoder; None has no teacher.
        kind: Kind.
    """

    def __init__(
        self, vision: Vision = Vision(), text: Text = Text(), teacher: Vision | None = None, kind: str = "plain"
    ) -> None:
        super().__init__(dim=vision.width, learning_rate=text.learning_rate)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path, "grouped.yaml", CONFIG)


def settings(version: int = 0) -> dict:
    return torch.load(f"runs/grouped/version_{version}/checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]


TYPOS = {
    "option": ("--model.vision.widht 3", ["Vision", "'--model.vision.widht'", "'--model.vision.width'"]),
    "long option": ("--model.init_args.vision.widht=3", ["Vision", "'--model.init_args.vision.width'"]),
    "group": ("--model.visoin.width 3", ["GroupedModel", "did you mean '--model.vision'"]),
    "optional group": ("--model.teacher.widht 3", ["Vision", "'--model.teacher.width'"]),
    "group as a mapping": (
        "--model.vision={widht:\u00a03}",
        ["of Vision in --model.vision, got 'model.init_args.vision.widht'", "'width'"],
    ),
    "type": ("--model.vision.width many", ["model.init_args.vision.width of Vision, got 'many'", "a whole number"]),
    "type of a tuple": ("--model.vision.rates=[1]", ["model.init_args.vision.rates of Vision, got [1]"]),
    "group as a number": ("--model.vision 3", ["'model.init_args.vision'", "3"]),
    "link": (
        "--model.text.vocab_size 99",
        ["model.init_args.text.vocab_size=99", "data.init_args.vocab_size=10"],
    ),
}


@pytest.mark.parametrize(("typed", "expected"), TYPOS.values(), ids=TYPOS)
def test_a_mistake_in_a_group_is_one_sentence(typed: str, expected: list[str]):
    ran = run("fit", "--config", "grouped.yaml", *(word.replace("\u00a0", " ") for word in typed.split(" ")))
    assert ran.status == 2
    for part in expected:
        assert part in ran.sentence


FILES = {
    "key": ("{vision: {widht: 3}}", ["'model.init_args.vision.widht'", "'width'", "of Vision in second.yaml"]),
    "type": (
        "{vision: {width: many}}",
        ["model.init_args.vision.width of Vision in second.yaml, got 'many'", "a whole number"],
    ),
    "link": ("{text: {vocab_size: 99}}", ["model.init_args.text.vocab_size=99 from second.yaml"]),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_a_mistake_in_a_group_of_a_file_names_the_file(tmp_path: Path, text: str, expected: list[str]):
    tiny_config(tmp_path, "second.yaml", f"model: {{class_path: GroupedModel, init_args: {text}}}")
    ran = run("fit", "--config", "grouped.yaml", "--config", "second.yaml")
    assert ran.status == 2
    for part in expected:
        assert part in ran.sentence


def test_the_help_and_the_printed_configuration_show_the_fields():
    ran = run("fit", "--model.help", "GroupedModel")
    assert ran.status == 0
    for line in ("--model.vision.width WIDTH", "Embedding dimension", "--model.text.vocab_size", "--model.teacher"):
        assert line in ran.out
    ran = run("fit", "--config=grouped.yaml", "--model.vision.image_size=32", "--print_config")
    printed = yaml.safe_load(ran.out)["model"]["init_args"]["vision"]
    assert printed == {"width": 5, "image_size": 32, "weights": None, "rates": [0.1, 0.2]}


@pytest.mark.parametrize("weights", ["./gone", "/gone/at/all", "~/gone", "no/such/folder", "gone.safetensors"])
def test_weights_at_a_path_that_does_not_exist_are_refused_before_the_data_is_read(weights: str):
    ran = run("fit", "--config=grouped.yaml", f"--model.vision.weights={weights}")
    assert ran.status == 2, ran.err
    assert f"Expected weights as --model.vision.weights, got {weights!r}, which does not exist" in ran.sentence
    assert not Path("runs").exists()


@pytest.mark.parametrize("weights", ["organization/name", "ViT-B-32/openai", "vit_base.in1k", "https://host/a.pt"])
def test_names_of_weights_are_left_to_the_method(weights: str):
    ran = run("fit", "--config=grouped.yaml", f"--model.vision.weights={weights}")
    assert ran.status == 0, ran.err


def test_typed_fields_win_on_resume_and_the_others_stay(tmp_path: Path):
    words = ("--model.vision.weights=a.pt", "--model.text.learning_rate=0.01", "--data.vocab_size=20")
    Path("a.pt").touch()
    ran = run("fit", "--config=grouped.yaml", *words, "--model.teacher.width=7")
    assert ran.status == 0, ran.err
    Path("a.pt").unlink()  # a run that goes on from a checkpoint does not need its initial weights
    trained = settings()
    assert trained["vision"] == {"width": 5, "image_size": 224, "weights": "a.pt", "rates": [0.1, 0.2]}
    assert trained["text"] == {"vocab_size": 20, "learning_rate": 0.01}
    assert trained["teacher"]["width"] == 7
    saved = yaml.safe_load(Path("runs/grouped/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["text"] == {"learning_rate": 0.01}  # vocab_size follows the data
    # One option, and one field in a file, of three groups.
    tiny_config(tmp_path, "more.yaml", "model: {class_path: GroupedModel, init_args: {vision: {image_size: 32}}}")
    tiny_config(tmp_path, "data.yaml", "data: {class_path: TinyData}\ntrainer: {accelerator: cpu, max_epochs: 2}")
    typed = ("--config=data.yaml", "--config=more.yaml", "--model.text.learning_rate=0.5", "--model.teacher.width=9")
    ran = run("fit", f"--ckpt_path={CHECKPOINT}", *typed, "--trainer.logger.name=grouped")
    assert ran.status == 0, ran.err
    after = settings(1)
    assert after["vision"] == {**trained["vision"], "image_size": 32}
    assert after["text"] == {"vocab_size": 20, "learning_rate": 0.5}
    assert after["teacher"] == {**trained["teacher"], "width": 9}
    assert after["kind"] == "fancy"
    lines = sorted(line for line in ran.err.splitlines() if "warning: model" in line)
    assert len(lines) == 3
    assert (
        "model.init_args.teacher.width is 9 from --model.teacher.width; 7 from the checkpoint is not used" in lines[0]
    )
    assert "model.init_args.text.learning_rate is 0.5" in lines[1]
    assert "model.init_args.vision.image_size is 32 from more.yaml" in lines[2]
    # The rate of the optimizer state gave way too.
    state = torch.load("runs/grouped/version_1/checkpoints/last.ckpt", weights_only=True)["optimizer_states"]
    assert state[0]["param_groups"][0]["lr"] == 0.5


def test_a_checkpoint_names_no_code_in_a_group():
    assert run("fit", "--config=grouped.yaml").status == 0
    content = torch.load(CHECKPOINT, weights_only=True)
    content["hyper_parameters"]["vision"]["width"] = {"class_path": "os.system", "init_args": {"command": "true"}}
    torch.save(content, "evil.ckpt")
    ran = run("fit", "--config=grouped.yaml", "--ckpt_path=evil.ckpt")
    assert ran.status == 2
    assert "'os.system'" in ran.sentence
