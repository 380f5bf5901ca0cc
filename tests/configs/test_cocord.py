"""CoCoRD's configs: the settings of the benchmark, and the quickstart."""

from pathlib import Path

import pytest
import yaml

from support.methods.cocord import PAIRS
from support.runs.command_line import run
from support.runs.recipes import ROOT, compose
from vlightning.lightning_modules.core.settings import flat


def test_cifar_pairs_are_those_of_the_paper_and_name_their_teachers_runs():
    files = [file for file in (ROOT / "configs/cocord/pairs").glob("*.yaml") if "imagenet" not in file.name]
    pairs = [yaml.safe_load(file.read_text())["model"]["init_args"] for file in files]
    assert {(pair["teacher"]["name"], pair["student"]) for pair in pairs} == set(PAIRS)
    assert len(files) == 13
    for pair in pairs:
        name = pair["teacher"]["name"]
        teacher = yaml.safe_load((ROOT / f"configs/cocord/teacher_{name.lower()}.yaml").read_text())
        assert teacher["model"]["init_args"]["student"] == name
        logger = teacher["trainer"]["logger"]["init_args"]
        assert pair["teacher"]["weights"] == f"{logger['save_dir']}/{logger['name']}"


def test_the_cifar_recipe_is_that_of_the_benchmark():
    composed = compose(ROOT / "configs/cocord/base.yaml", ROOT / "configs/cocord/pairs/resnet110_resnet32.yaml")
    model, data = composed["model"]["init_args"], composed["data"]["init_args"]
    assert composed["trainer"]["max_epochs"] == 240
    assert (data["global_batch_size"], data["preset"]) == (64, "cifar")
    assert data["num_classes"] == model["num_classes"] == 100
    expected = {
        "contrast.temperature": 0.1,
        "contrast.queue_size": 2048,
        "contrast.weight": 1,
        "prediction.weight": 4,
        "prediction.symmetric": True,
        "class_weight": 1,
        "kd.weight": 0,
        "momentum.teacher_head": 0.999,
        "momentum.slow_student": 0.9,
        "optim.lr_milestones": [150, 180, 210],
        "optim.lr_decay": 0.1,
        "optim.momentum": 0.9,
        "optim.weight_decay": 5e-4,
        "optim.learning_rate": None,  # by the student's family
    }
    found = flat(model)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
def test_cocord_quickstart_distils_the_teacher_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    student = ("--config", str(ROOT / "configs/cocord/quickstart.yaml"))
    short = ("--data.length=32", "--data.batch_size=16", "--data.eval_length=40", "--data.num_workers=0")
    short += ("--trainer.max_epochs=1",)
    ran = run("fit", *student, *short)
    assert ran.status == 1
    assert "configs/cocord/quickstart_teacher.yaml" in ran.err
    assert run("fit", "--config", str(ROOT / "configs/cocord/quickstart_teacher.yaml"), *short).status == 0
    ran = run("fit", *student, *short)
    assert ran.status == 0, ran.err
    checkpoints = sorted(Path("runs/cocord_quickstart").glob("*/checkpoints/*.ckpt"))
    last = next(path for path in checkpoints if path.name == "last.ckpt")
    assert any(path.name.startswith("best-step") for path in checkpoints)
    printed = {}
    for command in ("validate", "test", "predict"):
        ran = run(command, "--ckpt_path", str(last))
        assert ran.status == 0, ran.err
        assert "nan" not in ran.out
        printed[command] = ran.out
    assert "test/top1" in printed["test"]
    assert list(Path("runs").rglob("predictions.parquet"))
