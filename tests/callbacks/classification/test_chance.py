"""Chance levels of callbacks that evaluate: in the table, in `metrics.json`."""

import json
import re
from pathlib import Path

from support.command_line import run

MODEL = ["--model", "SHReModule", "--model.num_classes", "40", "--model.vision", "{width: 16, depth: 1, heads: 2}"]
MODEL += ["--model.text.depth", "1", "--data", "ShapesDataModule", "--data.image_size", "32", "--data.eval_length", "8"]
MODEL += ["--trainer.accelerator", "cpu", "--data.num_workers", "0", "--data.length", "16"]
CALLBACK = ["--trainer.callbacks+=ZeroShotClassification", "--trainer.callbacks.data=ShapeClassesDataModule"]
CALLBACK += ["--trainer.callbacks.data.eval_length=40", "--trainer.callbacks.templates=simple"]


def test_zero_shot_classification_stands_beside_its_chance_level(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run("validate", *MODEL, *CALLBACK)
    assert ran.status == 0, ran.err
    (file,) = Path().rglob("metrics.json")
    chance = json.loads(file.read_text())["chance"]
    found = {name: level for name, level in chance.items() if "zero_shot" in name}
    assert found == {"val/zero_shot_top1": 2.5, "val/zero_shot_top5": 12.5, "val/zero_shot_class_recall": 2.5}
    assert "val/h2/recall_mean" in chance  # the module's own
    assert re.search(r"^val/zero_shot_top5 +[\d.]+ +12\.5$", ran.out, re.MULTILINE)
