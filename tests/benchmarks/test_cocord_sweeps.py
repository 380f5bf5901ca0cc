"""Rows of `benchmarks/cocord_sweeps.py`, with runs of a few steps in this process."""

import re
import sys

import cocord_sweeps
import pytest
import tables
import yaml

from support.methods.cocord import HEADS, teacher_file
from support.methods.groups import in_groups
from support.runs.command_line import run
from vlightning.lightning_modules import CoCoRDModule

SHAPES = [
    *("--data=ShapeClassesDataModule", "--data.length=16", "--data.eval_length=40", "--data.batch_size=8"),
    *("--data.image_size=16", "--data.num_workers=0", "--model.num_classes=40", "--model.contrast.queue_size=16"),
    *("--model.heads.embed_dim=16", "--model.heads.hidden=12", "--model.heads.predictor_hidden=8"),
    *("--trainer.accelerator=cpu", "--trainer.num_sanity_val_steps=0"),
]


@pytest.fixture
def commands(monkeypatch):
    """The commands that the sweeps ran, in this process."""
    found = []

    def here(words, output, threads, program=()):
        found.append(words)
        ran = run(*words)
        assert ran.status == 0, ran.err

    monkeypatch.setattr(tables, "run", here)
    return found


@pytest.mark.parametrize("name", cocord_sweeps.SWEEPS)
def test_a_sweep_changes_settings_of_the_module_and_has_the_papers_default_once(name):
    settings = cocord_sweeps.SWEEPS[name]
    names = [cocord_sweeps.folder_name(setting) for setting in settings]
    assert len(set(names)) == len(names)
    assert names.count("default") == 1
    for setting in settings:
        words = [word.removeprefix("--model.").split("=") for word in setting.words]
        changes = {option: yaml.safe_load(value) for option, value in words}
        changes = {"heads": HEADS["heads"], "teacher.name": "resnet8"} | changes
        module = CoCoRDModule("resnet8", 5, **in_groups(CoCoRDModule, changes))
        assert module.hparams.student == "resnet8"
        module.momentum_pairs()


def test_a_sweep_writes_the_row_of_a_setting_and_reads_it_again(tmp_path, monkeypatch, commands):
    recipe = tmp_path / "recipe.yaml"
    teacher = {"name": "resnet8", "weights": teacher_file(tmp_path, "resnet8", classes=40)}
    model = {"class_path": "CoCoRDModule", "init_args": {"student": "resnet8", "teacher": teacher}}
    recipe.write_text(yaml.safe_dump({"model": model}))
    monkeypatch.setitem(cocord_sweeps.SWEEPS, "losses", cocord_sweeps.SWEEPS["losses"][3:])
    words = ["sweeps", str(tmp_path / "runs"), "--sweeps=losses", "--config", str(recipe), "--seeds=0", "--epochs=1"]
    monkeypatch.setattr(sys, "argv", [*words, "--", *SHAPES])
    cocord_sweeps.main()
    written = (tmp_path / "runs/sweeps.md").read_text()
    assert "losses (Table 7), 1 epochs, seeds 0\n\n| setting | paper | last epoch | best epoch |\n|---" in written
    row = r"^\| without prediction \| 72\.92 ± 0\.23 \| (\d+\.\d\d ± 0\.00) \| \1 \|$"
    assert re.search(row, written, re.MULTILINE), written
    config = yaml.safe_load((tmp_path / "runs/prediction.weight=0_seed0/version_0/config.yaml").read_text())
    assert config["model"]["init_args"]["prediction"]["weight"] == 0
    cocord_sweeps.main()
    assert len(commands) == 1
    assert (tmp_path / "runs/sweeps.md").read_text() == written
