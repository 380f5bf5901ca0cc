"""Rows of `benchmarks/cocord_table.py` and `benchmarks/cocord_sweeps.py`, with runs of a few steps in this process."""

import re
import sys

import cocord_table
import pytest
import tables
import yaml

from support.command_line import run

SHAPES = [
    *("--data=ShapeClassesDataModule", "--data.length=16", "--data.eval_length=40", "--data.batch_size=8"),
    *("--data.image_size=16", "--data.num_workers=0", "--model.num_classes=40", "--model.contrast.queue_size=16"),
    *("--model.heads.embed_dim=16", "--model.heads.hidden=12", "--model.heads.predictor_hidden=8"),
    *("--trainer.accelerator=cpu", "--trainer.num_sanity_val_steps=0"),
]


@pytest.fixture
def commands(monkeypatch):
    """The commands that a table ran, in this process."""
    found = []

    def here(words, output, threads, program=()):
        found.append(words)
        ran = run(*words)
        assert ran.status == 0, ran.err

    monkeypatch.setattr(tables, "run", here)
    return found


def test_each_row_of_the_table_is_a_run_with_its_losses(tmp_path, monkeypatch, capsys, commands):
    rows = ["vanilla", "KD", "FitNet", "AT", "CRD", "CoCoRD", "CRD+KD", "CoCoRD+KD"]
    assert list(cocord_table.ROWS) == rows
    words = ["table", str(tmp_path), "--teacher=resnet8", "--student=resnet8", "--seeds=0", "--epochs=1"]
    words += ["--rows", "CRD+KD", "--", *SHAPES]
    monkeypatch.setattr(sys, "argv", words)
    cocord_table.main()
    shown = capsys.readouterr().out
    assert re.search(r"^CRD\+KD +\d+\.\d\d ± 0\.00", shown, re.MULTILINE), shown
    config = yaml.safe_load((tmp_path / "CRD+KD_seed0/version_0/config.yaml").read_text())
    kd = config["model"]["init_args"]["kd"]
    assert (kd["weight"], kd["crd_weight"], kd["crd_negatives"]) == (1.0, 0.8, 16384)
    assert len(commands) == 2  # the teacher's, too
    cocord_table.main()  # a complete table is printed only
    assert len(commands) == 2
    table = "\nresnet8, 1 epochs"
    assert capsys.readouterr().out.partition(table)[1:] == shown.partition(table)[1:]
