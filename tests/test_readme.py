"""Commands, configs and examples of the README and of the methods' pages are valid."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from support.command_line import run
from support.images import draw_image
from support.reinforcement import write_pairs
from vlightning.datamodules import ReinforcedShapesDataModule
from vlightning.evaluate.command import parser_of_evaluate
from vlightning.lightning_modules import MobileCLIPModule

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = "\n".join([README, *(path.read_text() for path in sorted((ROOT / "docs/methods").glob("*.md")))])


def block(name: str, page: str = README) -> str:
    """Content of the code block between two markers."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w*\n(.*?)```\n<!-- end of {re.escape(name)} -->", page, re.S)
    assert found, f"there is no block {name!r}"
    return found.group(1)


@pytest.mark.parametrize(
    ("page", "file"),
    [("README.md", "tests/support/plain_moco.py"), ("docs/adding_a_method.md", "tests/support/toy_method.py")],
)
def test_examples_are_shown_literally(page, file):
    assert block(file, (ROOT / page).read_text()) == (ROOT / file).read_text()


def test_ci_runs_the_test_command_of_the_readme():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    shown = subprocess.run([ROOT / ".ci/run", "--show"], cwd="/", capture_output=True, text=True, timeout=60)
    assert shown.stdout == block("test command")
    assert "pytest" in shown.stdout


def test_every_config_that_is_named_exists_and_every_shipped_one_is_named():
    named = set(re.findall(r"configs/[\w/]+\.yaml", PAGES))
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert named <= shipped
    assert shipped <= named


OWN_DATA = re.search(r"```yaml\n# my_data.yaml\n(.*?)```", README, re.S)
LINES = PAGES.replace("\\\n", " ").splitlines()
COMMANDS = [line.split("&& ")[-1] for line in LINES if line.startswith(("vlightning ", "pip install -e . &&"))]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_shown_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert OWN_DATA is not None
    Path("my_data.yaml").write_text(OWN_DATA.group(1))
    words = command.split()[1:]
    if words[0] == "export":  # options are parsed before the checkpoint is looked for
        assert "runs/" in (sentence := run(*words).sentence), sentence
        return
    if words[0] == "evaluate":  # tests/evaluate/test_command.py runs them
        assert parser_of_evaluate().parse_args(words[1:])
        return
    if "--ckpt_path" in words:
        at = words.index("--ckpt_path")
        assert re.fullmatch(r"runs/[\w/]+(/version_0|/checkpoints/last.ckpt)", words[at + 1])
        del words[at : at + 2]
        if words == ["test"]:
            return  # everything comes from the checkpoint: tests/cli_support/test_resume.py
    ran = run(*words, *([] if "--print_config" in words else ["--print_config"]))
    assert ran.status == 0, ran.err


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5
    assert COMMANDS[0] == "vlightning fit --config configs/albef/quickstart.yaml"


def words_of(start: str) -> list[str]:
    """The one command of the README that begins so, without the program's name."""
    (found,) = [command for command in COMMANDS if command.startswith(start)]
    return found.split()[1:]


SMALL = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.num_workers=0")


def test_the_command_for_ones_own_classes_trains_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = words_of("vlightning fit --config configs/cocord/vanilla.yaml --model.student torchvision/resnet18 ")
    for label in range(12):
        for split in ("train", "val"):
            file = Path(f"images/{split}/class {label:02d}/one.png")
            file.parent.mkdir(parents=True)
            draw_image(label).save(file)
    said = yaml.safe_load(run(*words, "--print_config").out)
    assert (said["trainer"]["max_epochs"], said["data"]["init_args"]["preset"]) == (90, "imagenet")
    small = ("--trainer.max_epochs=2", "--data.batch_size=12", "--data.image_size=32", "--data.cache_dir=cache")
    ran = run(*words, *SMALL, *small)
    assert ran.status == 0, ran.err
    (last,) = Path("runs").rglob("last.ckpt")
    state = torch.load(last, weights_only=True)
    assert len(state["state_dict"]["student.network.fc.bias"]) == 12
    assert state["global_step"] == 2
    assert list(Path("runs").rglob("best-step*.ckpt"))
    for label in (10, 11):
        for split in ("train", "val"):
            shutil.rmtree(f"images/{split}/class {label:02d}")
    refused = run(*words, *SMALL, *small).sentence
    assert "classes in the training data, got 10" in refused
    assert "set data.num_classes to 10" in refused


def test_the_command_for_ones_own_reinforced_data_trains_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = words_of("vlightning fit --model MobileCLIPModule --data ReinforcedImageTextDataModule ")
    made = ReinforcedShapesDataModule("made", length=8, eval_length=2, augmentations=1, image_size=32)
    made.prepare_data()
    made.folder.rename("reinforced")
    teachers = [{"width": 64, "scale": 20.0}, {"width": 96, "scale": 50.0}]
    Path("reinforced/manifest.json").write_text(json.dumps({"teachers": teachers}))
    write_pairs("validation.parquet", 4)
    small = ("--model.model=MobileCLIP-tiny", "--data.image_size=32", "--data.max_tokens=16", "--data.batch_size=4")
    small = (*SMALL, *small, "--data.cache_dir=cache", "--trainer.max_epochs=1")
    heard: list[tuple[list[int], list[float]]] = []
    step = MobileCLIPModule.training_step

    def listening(self: MobileCLIPModule, *batch: Any) -> Any:
        heard.append(tuple(self.teachers))
        return step(self, *batch)

    monkeypatch.setattr(MobileCLIPModule, "training_step", listening)
    ran = run(*words, *small)
    assert ran.status == 0, ran.err
    assert heard == [([64, 96], [20.0, 50.0])] * 2
    assert list(Path("runs").rglob("best-step*.ckpt"))
    refused = run(*words, *small, "--model.teacher.scales=[100,100]").sentence
    assert refused.startswith("Expected a teacher.scales of [20.0, 50.0]")
    assert "got [100.0, 100.0]" in refused
    Path("reinforced/manifest.json").write_text("{}")
    assert "Expected width and scale of each teacher in" in run(*words, *small).sentence
