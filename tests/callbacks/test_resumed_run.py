"""Callbacks of Lightning's that monitor metrics, in a run that resumes."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging

from support.methods.tiny_modules import SaveSecond, Student, loader, trainer
from support.runs.command_line import run
from vlightning.callbacks import StepSeedCallback
from vlightning.common.errors import UserError

CONFIG = Path(__file__).resolve().parents[2] / "configs/albef/quickstart.yaml"
DATA = {"length": 64, "eval_length": 32, "batch_size": 32, "num_workers": 0}
STOP = {"monitor": "val/recall_mean", "mode": "max", "min_delta": 1000.0}  # no later validation is better


def fit(*words: str, patience: int):
    options = {f"data.{name}": value for name, value in DATA.items()}
    options |= {f"trainer.callbacks.{name}": value for name, value in (STOP | {"patience": patience}).items()}
    return run(
        "fit",
        *("--config", CONFIG, "--trainer.accelerator=cpu", "--trainer.callbacks+=EarlyStopping"),
        *(f"--{name}={value}" for name, value in options.items()),
        *words,
    )


def last_step(run_folder: Path) -> int:
    return torch.load(run_folder / "checkpoints/last.ckpt", weights_only=True)["global_step"]


@pytest.mark.slow
def test_a_run_that_ended_early_stays_ended_until_its_patience_is_larger(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert fit("--trainer.max_epochs=5", patience=1).status == 0
    first = tmp_path / "runs/albef_quickstart/version_0"
    assert last_step(first) == 4  # two epochs of two steps
    checkpoint = first / "checkpoints/last.ckpt"
    with caplog.at_level("INFO"):
        again = fit("--ckpt_path", checkpoint, patience=1)
    assert again.status == 0
    assert re.search("EarlyStopping had ended the run .* by val/recall_mean", caplog.text)
    assert not [path for path in tmp_path.rglob("version_1/checkpoints/*.ckpt") if last_step(path.parents[1]) > 4]
    assert fit("--ckpt_path", checkpoint, patience=3).status == 0
    assert last_step(tmp_path / "runs/albef_quickstart/version_2") == 8


def test_a_run_with_stochastic_weight_averaging_does_not_resume(tmp_path):
    def averaging():
        return StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), StepSeedCallback()

    path = tmp_path / "second.ckpt"
    trainer(*averaging(), SaveSecond(path), max_epochs=3).fit(Student(), loader(2))
    for callbacks in (averaging(), (StepSeedCallback(),)):
        with pytest.raises(UserError, match=r"one with StochasticWeightAveraging, whose schedule .* start anew"):
            trainer(*callbacks, max_epochs=3).fit(Student(), loader(2), ckpt_path=path)
    trainer(StepSeedCallback()).validate(Student(), loader(2), ckpt_path=path)


class OnPlateau(Student):
    """Has a schedule that monitors a metric."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def test_a_resumed_run_says_that_a_schedule_by_metric_omits_an_update(tmp_path, recwarn):
    path = tmp_path / "second.ckpt"
    trainer(SaveSecond(path), StepSeedCallback(), max_epochs=3).fit(OnPlateau(), loader(2))
    assert not [warning for warning in recwarn if "ReduceLROnPlateau" in str(warning.message)]
    with pytest.warns(match="not exactly: Lightning does not update ReduceLROnPlateau"):
        trainer(StepSeedCallback(), max_epochs=3).fit(OnPlateau(), loader(2), ckpt_path=path)
