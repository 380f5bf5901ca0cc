"""`global_batch_size`: the batch of all processes together."""

import pytest

from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule

ROWS = {"length": 48, "eval_length": 12, "image_size": 16, "num_workers": 0, "seed": 3}


def batches(replicas, rank, monkeypatch, **sizes):
    data = ShapesDataModule(**ROWS, vocab_size=200, **sizes)
    monkeypatch.setattr(data, "replicas", lambda: (replicas, rank))
    data.prepare_data()
    data.setup("fit")
    return data, [batch["sample_index"].tolist() for batch in data.train_dataloader()]


def test_any_number_of_processes_divides_the_same_global_batches(monkeypatch):
    data, whole = batches(1, 0, monkeypatch, global_batch_size=12)
    assert (data.batch_size, data.eval_batch_size, len(whole)) == (12, 12, 4)
    for replicas in (2, 3):
        parts = [batches(replicas, rank, monkeypatch, global_batch_size=12) for rank in range(replicas)]
        assert [part[0].batch_size for part in parts] == [12 // replicas] * replicas
        together = [[row for part in batch for row in part] for batch in zip(*(part[1] for part in parts), strict=True)]
        assert together == whole


def test_evaluation_has_its_own_batch(monkeypatch):
    data, _ = batches(2, 0, monkeypatch, global_batch_size=12, eval_batch_size=4)
    assert data.eval_batch_size == 4


def test_a_remainder_is_refused(monkeypatch):
    with pytest.raises(UserError, match="global_batch_size that the 5 processes divide evenly, got 12"):
        batches(5, 0, monkeypatch, global_batch_size=12)


@pytest.mark.parametrize("cls", [ShapesDataModule, ShapeClassesDataModule])
def test_two_batch_sizes_are_refused(cls):
    with pytest.raises(UserError, match=r"got 7 and 12: set data.global_batch_size alone, or to null"):
        cls(batch_size=7, global_batch_size=12)
    with pytest.raises(UserError, match=r"Expected data.global_batch_size of at least 1, got 0"):
        cls(global_batch_size=0)
    with pytest.raises(UserError, match=r"Expected data.eval_batch_size of at least 1, got 0"):
        cls(eval_batch_size=0)


def test_a_resumed_run_on_the_command_line_keeps_the_global_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = [f"--data.{name}={value}" for name, value in {**ROWS, "vocab_size": 200}.items()]
    trainer = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=0")
    words = ("--model=support.methods.tiny.ImageModel", "--data=ShapesDataModule", *data, *trainer)
    ran = run("fit", *words, "--data.global_batch_size=12", "--trainer.max_steps=2")
    assert ran.status == 0, ran.err
    assert "global_batch_size: 12" in (tmp_path / "runs/vlightning/version_0/config.yaml").read_text()
    refused = run("fit", *words, "--data.global_batch_size=12", "--data.batch_size=6")
    assert "got 6 and 12: set data.global_batch_size alone, or to null" in refused.sentence
