"""Every command of the README and of docs/ runs, or is parsed where it needs data, weights or hours."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from support.data.images import draw_image
from support.methods.reinforcement import write_pairs
from support.project.pages import PAGES, ROOT, blocks, commands
from support.runs.command_line import run
from vlightning.commands.cli.start import LISTS
from vlightning.commands.compare.command import parser_of_compare
from vlightning.commands.compare.settings import Variant
from vlightning.commands.data.command import parser_of_data
from vlightning.commands.demo.command import parser_of_demo
from vlightning.commands.embed.command import parser_of_embed
from vlightning.commands.evaluate.command import parser_of_evaluate
from vlightning.commands.plan.command import parser_of_plan
from vlightning.commands.search.command import parser_of_search
from vlightning.datamodules import ReinforcedShapesDataModule
from vlightning.lightning_modules import MobileCLIPModule

OWN_FILES = {
    "my_data.yaml": blocks("docs/data.md", "yaml"),
    "photos.yaml": blocks("docs/two_towers.md", "yaml"),
    "emoji.yaml": blocks("docs/two_towers.md", "yaml"),
}
"""Files that readers write, which commands name, and the blocks of their pages."""
COMMANDS = [command.split("&& ")[-1] for command in commands() if re.search(r"(^|&& )vlightning( |$)", command)]
OTHERS = [command for command in commands() if not re.search(r"(^|&& )vlightning( |$)", command)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_shown_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, found in OWN_FILES.items():
        (content,) = [block for block in found if block.startswith(f"# {name}\n")]
        Path(name).write_text(content)
    words = shlex.split(command)[1:]
    match words[:1]:
        case [] | ["--help"]:
            assert run(*words).status == 0
            return
        case ["compare"]:  # tests/commands/test_compare.py runs it
            typed = parser_of_compare().parse_args(words[1 : words.index("--")] if "--" in words else words[1:])
            assert [Variant.parse(text) for text in typed.configs]
            return
        case [name] if name in LISTS:
            assert run(*words).status == 0
            return
        case ["export" | "convert"]:  # options are parsed before the checkpoint is looked for
            (checkpoint,) = [word for word in words if word.endswith(".ckpt")][:1]
            assert checkpoint in (sentence := run(*words).sentence), sentence
            return
        case ["push"]:  # the folder is looked for after the options are parsed, and before the hub is asked
            assert "nothing there" in run(*words).sentence
            return
        case ["evaluate"]:  # tests/commands/evaluate/test_command.py runs them
            assert parser_of_evaluate().parse_args(words[1:])
            return
        case ["demo"]:  # tests/commands/demo runs it
            assert parser_of_demo().parse_args(words[1:])
            return
        case ["search"]:  # tests/commands/search runs it
            assert parser_of_search().parse_args(words[1:])
            return
        case ["embed"]:  # the model comes first
            words = ["fit", *parsed_rest(parser_of_embed(), words[1 if words[1].startswith("-") else 2 :])]
            if "--config=" not in words[1]:
                words[1:1] = ["--model=CLIPModule", "--data=ImageTextDataModule"]
        case ["plan"]:
            words = ["fit", *parsed_rest(parser_of_plan(), words[1:])]
        case ["data"]:
            words = ["fit", *parsed_rest(parser_of_data(), words[1:])]
    if "--ckpt_path" in words:
        at = words.index("--ckpt_path")
        assert re.fullmatch(r"last|runs/[\w/]+(/version_0|/checkpoints/last.ckpt)", words[at + 1])
        del words[at : at + 2]
        if words == ["test"] or words == ["predict"]:
            return  # everything comes from the checkpoint: tests/commands/cli/test_resume.py
        if words[0] == "predict":  # the classes come from it, here those of a run with stores
            words[1:1] = ["--model=CLIPModule", "--data=ImageTextDataModule"]
    if any(word.endswith(".help") for word in words):
        assert run(*words).status == 0
        return
    ran = run(*words, *([] if "--print_config" in words else ["--print_config"]))
    assert ran.status == 0, ran.err


def parsed_rest(parser: Any, words: list[str]) -> list[str]:
    """What a command passes on to `fit`, after its own options were parsed."""
    typed, rest = parser.parse_known_args(words)
    return [*(f"--config={config}" for config in typed.config), *rest]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 80
    assert COMMANDS[0] == "vlightning fit --config configs/albef/quickstart.yaml"


PROGRAMS = (
    "pip install ",
    "python3 -m venv ",
    "pytest ",
    "mkdocs ",
    "sbatch ",
    "export VLIGHTNING_JOB=albef-4m",
    "torchrun ",
    "kubectl ",
    "sky jobs launch ",
    "modal run ",
    "python configs/engines/",  # tests/guarantees/test_engines.py and test_engine_files.py
    "tensorboard --logdir runs",
    "eval ",
    "hf auth login",
)


@pytest.mark.parametrize("command", OTHERS)
def test_other_commands_name_scripts_and_options_that_exist(command: str):
    if not command.startswith("python benchmarks/"):
        assert command.startswith(PROGRAMS)  # those of CI, and of tests/guarantees/recipes/test_configs.py
        extras = re.findall(r'"\.\[([\w,]+)\]"', command)
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
        return
    script, *words = shlex.split(command)[1:]
    source = (ROOT / script).read_text()
    options = [word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")]
    assert not [name for name in options if f'"{name}"' not in source and f'"{name[2:]}"' not in source]


PAGE_OF = {"strategy": "docs/runs.md", "slurm": "docs/clusters.md", "engines": "docs/engines.md"}


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "configs").iterdir()))
def test_each_config_is_on_the_page_of_its_method_and_each_named_one_exists(folder: str):
    page = PAGES[PAGE_OF.get(folder, f"docs/methods/{folder}.md")]
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "configs" / folder).rglob("*.*")}
    assert shipped <= set(re.findall(r"configs/[\w/]+\.(?:yaml|sh|py)", page))
    named = {name for text in PAGES.values() for name in re.findall(rf"configs/{folder}/[\w/]+\.(?:yaml|sh|py)", text)}
    assert named <= shipped


def words_of(start: str) -> list[str]:
    """The one command that begins so, without the program's name."""
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
        heard.append((self.teachers.dims, self.teachers.scales))
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
