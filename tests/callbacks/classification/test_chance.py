"""Chance levels of callbacks that evaluate: in the table, in `metrics.json`."""

import json
import re
from pathlib import Path

import pytest

from support.runs.command_line import run

MODEL = ["--model", "SHReModule", "--model.num_classes", "40", "--model.vision", "{width: 16, depth: 1, heads: 2}"]
MODEL += ["--model.text.depth", "1", "--data", "ShapesDataModule", "--data.image_size", "32", "--data.eval_length", "8"]
MODEL += ["--trainer.accelerator", "cpu", "--data.num_workers", "0", "--data.length", "16"]
DATA = ["--trainer.callbacks.data=ShapeClassesDataModule", "--trainer.callbacks.data.eval_length=40"]
LEVELS = {"top1": 2.5, "top5": 12.5, "class_recall": 2.5}
"""Of 40 classes."""
CLASSIFIER = [
    "--model=MMLGImageClassifierModule",
    "--model.num_classes=40",
    "--model.vision={width: 16, depth: 1, heads: 2, patch_size: 8}",
]
CLASSIFIER += ["--data=ShapeClassesDataModule", "--data.eval_length=40", "--data.length=16", "--data.batch_size=8"]
CLASSIFIER += ["--trainer.accelerator=cpu", "--trainer.max_steps=1"]


def evaluated(stage, *words):
    """Evaluate; return the rows of the table and the chance levels of the file."""
    ran = run(stage, *words)
    assert ran.status == 0, ran.err
    newest = max(Path().rglob("metrics.json"), key=lambda file: file.stat().st_mtime_ns)
    rows = re.findall(r"^(\w+/\S+) +[\d.]+ +([\d.]+)$", ran.out, re.MULTILINE)
    return {name: float(level) for name, level in rows}, json.loads(newest.read_text())["chance"]


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize(
    ("callback", "name", "options"),
    [
        ("ZeroShotClassification", "zero_shot", ["templates=simple"]),
        ("OwnClassification", "supervised_teacher", []),
        ("NearestNeighbourClassification", "neighbours", ["k=3", "data.length=16"]),
    ],
)
def test_a_classification_stands_beside_its_chance_level(callback, name, options, stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [f"--trainer.callbacks.{option}" for option in options]
    shown, written = evaluated(stage, *MODEL, f"--trainer.callbacks+={callback}", *DATA, *options)
    prefix = {"validate": "val", "test": "test"}[stage]
    expected = {f"{prefix}/{name}_{metric}": level for metric, level in LEVELS.items()}
    assert {metric: level for metric, level in written.items() if name in metric} == expected
    assert {metric: level for metric, level in shown.items() if name in metric} == expected
    assert f"{prefix}/h2/recall_mean" in written  # the module's own


def test_a_probe_stands_beside_its_chance_level(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    probe = ["--trainer.callbacks+=OnlineLinearProbe", "--trainer.callbacks.num_classes=40"]
    probe += ["--trainer.callbacks.method=forward"]
    ran = run("fit", *CLASSIFIER, *probe)
    assert ran.status == 0, ran.err
    (last,) = Path().rglob("last.ckpt")
    shown, written = evaluated("validate", *CLASSIFIER, *probe, f"--ckpt_path={last}")
    expected = {"val/probe_top1": 2.5, "val/probe_top5": 12.5}
    assert {metric: level for metric, level in written.items() if "probe" in metric} == expected
    assert {metric: level for metric, level in shown.items() if "probe" in metric} == expected
