"""Lines and speeds of runs, by a clock that the tests set."""

import csv
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from support.methods.tiny import ReportingModel, TinyData
from vlightning.callbacks import ProgressLines, SpeedMonitor, progress, speed
from vlightning.callbacks.speed import samples_of_all
from vlightning.common.errors import UserError


class Clock(Callback):
    """Two seconds for a batch of the training, six for one of an evaluation."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        for module in (progress, speed):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)

    def on_train_batch_start(self, *_) -> None:
        self.now += 2

    def on_validation_batch_start(self, *_) -> None:
        self.now += 6

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


def trained(
    monkeypatch, lines: ProgressLines, folder: Path | None = None, peak: float | None = None, **options
) -> Trainer:
    """Train 3 epochs of 16 steps with 4 samples each."""
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, "enable_model_summary": False}
    logger = False if folder is None else CSVLogger(folder)
    callbacks = [lines, SpeedMonitor(peak), Clock(monkeypatch)]
    options = {"max_epochs": 3, "log_every_n_steps": 10, **quiet, **options}
    trainer = Trainer(callbacks=callbacks, logger=logger, **options)
    trainer.fit(ReportingModel(), TinyData(batch_size=4, rows=64))
    return trainer


def test_a_line_has_epoch_step_metrics_speed_and_the_time_left(monkeypatch, capsys):
    trained(monkeypatch, ProgressLines(20))
    lines = [re.sub(r"loss [\d.e-]+", "loss L", line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("Epoch 0")] == [
        "Epoch 0/2, step 1/48, loss L",
        "Epoch 0/2, step 11/48, loss L, 2.0 samples/s, 0:01:14 left",
    ]
    # The steps to come take as long as those before, validations included.
    assert "Epoch 1/2, step 17/48, loss L, val/recall_mean 79.46, 2.0 samples/s, 0:04:08 left" in lines
    assert lines[-1] == "Epoch 2/2, step 48/48, loss L, val/recall_mean 79.46, 2.0 samples/s, 0:00:00 left"
    shown = [
        f"batch {batch}/16, 0.7 samples/s, 0:0{left} left" for batch, left in ((4, "1:12"), (8, "0:48"), (12, "0:24"))
    ]
    assert [line for line in lines if "after step 16: " in line][:3] == [
        f"Validation after step 16: {text}" for text in shown
    ]


def test_a_line_has_the_mfu_where_the_rate_of_the_device_is_known(monkeypatch, capsys):
    # A sample takes 2 x 2 x (3 x 4) + 3 x 2 x 4 = 72 operations: 144 in a second.
    trained(monkeypatch, ProgressLines(20), peak=1000.0)
    lines = capsys.readouterr().out.splitlines()
    assert "MFU" not in lines[0]
    assert lines[1].endswith(", 2.0 samples/s, MFU 14.4%, 0:01:14 left")


def test_metrics_are_read_from_the_device_for_the_lines_alone(monkeypatch, capsys):
    reads = []
    monkeypatch.setattr(ProgressLines, "get_metrics", lambda *_: reads.append(1) or {})
    trained(monkeypatch, ProgressLines(1e9))
    assert len(capsys.readouterr().out.splitlines()) == len(reads) == 2  # after the first step and after the last


def test_a_run_of_unknown_length_has_no_time_left_but_that_of_its_limit(monkeypatch, capsys):
    endless = {"max_epochs": -1, "limit_val_batches": 0}
    with pytest.raises(InterruptedError):
        trained(monkeypatch, _Stops(20), **endless)
    assert capsys.readouterr().out.splitlines()[-1].endswith("2.0 samples/s")
    with pytest.raises(InterruptedError):
        trained(monkeypatch, _Stops(20), **endless, max_time="00:01:00:00")
    assert capsys.readouterr().out.splitlines()[-1].endswith(("1:00:00 left", "0:59:59 left"))


class _Stops(ProgressLines):
    def on_train_batch_end(self, trainer, *args) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == 30:
            raise InterruptedError


@pytest.mark.parametrize(("stage", "what"), [("validate", "Validation"), ("test", "Test"), ("predict", "Prediction")])
def test_an_evaluation_prints_lines(monkeypatch, capsys, stage, what):
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_model_summary=False, callbacks=[ProgressLines(20), Clock(monkeypatch)]
    )
    options = {} if stage == "predict" else {"verbose": False}
    getattr(trainer, stage)(ReportingModel(), TinyData(batch_size=4, rows=40), **options)
    assert capsys.readouterr().out.splitlines() == [
        f"{what}: batch 4/10, 0.7 samples/s, 0:00:36 left",
        f"{what}: batch 8/10, 0.7 samples/s, 0:00:12 left",
    ]


def test_only_rank_0_prints(capsys):
    lines = ProgressLines()
    lines.setup(SimpleNamespace(is_global_zero=False), None, "fit")
    lines.print("a")
    assert capsys.readouterr().out == ""


def test_a_negative_interval_is_refused():
    with pytest.raises(UserError, match="Expected interval of ProgressLines of at least 0, got -1"):
        ProgressLines(-1)


def test_samples_per_second_are_logged_without_validations(monkeypatch, tmp_path):
    trained(monkeypatch, ProgressLines(1e9), tmp_path)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as opened:
        rows = [(row["step"], row["train/samples_per_second"]) for row in csv.DictReader(opened)]
    assert [row for row in rows if row[1]] == [(str(step), "2.0") for step in (9, 19, 29, 39)]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"boxes": [torch.zeros(2, 4)] * 3, "sample_index": torch.arange(3)}, 3),
        ({"text": ["a", "b"], "image": torch.zeros(5, 3, 2, 2)}, 5),
        ((torch.zeros(()), (torch.zeros(6, 2), torch.zeros(6))), 6),
        (torch.zeros(7, 2), 7),
        ("text", 0),
    ],
)
def test_the_samples_of_a_batch(batch, samples):
    assert samples_of_all(SimpleNamespace(distributed_sampler_kwargs=None), batch) == samples
    four = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4, "rank": 1})
    assert samples_of_all(four, batch) == 4 * samples
