"""A run resumes exactly from every checkpoint: after each step, each validation and each epoch."""

import os
import signal

import pytest
import torch
from lightning import Callback, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from support.methods.methods import METHODS, OTHERS
from support.methods.tiny_modules import trainer
from vlightning.callbacks import AtomicCheckpointIO, SkipNonFiniteSteps, StopOnSignal

EPOCHS = 2


class AtEpochEnd(ModelCheckpoint):
    """Of another class, and so with a state of its own."""


class Recorder(Callback):
    """Samples by the number of batches before, and what was measured by the number of steps before."""

    def __init__(self):
        self.samples, self.measured = {}, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        before = trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        self.samples[before] = batch["sample_index"].tolist()

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
            self.measured.setdefault(trainer.fit_loop.epoch_loop.batch_progress.total.ready, []).append(metrics)


def fit(method, outside, seed, options, *callbacks, folder=None, resume=None):
    """Run an uninterrupted run that writes checkpoints, or resume from one of them without writing."""
    seed_everything(seed, verbose=False)
    module, data = (METHODS | OTHERS)[method].build(outside, seed, batch_size=8, num_workers=0)
    recorder = Recorder()
    if folder is not None:
        keep = {"auto_insert_metric_name": False, "save_top_k": -1}
        callbacks += (
            ModelCheckpoint(folder, filename="step{step}", every_n_train_steps=1, **keep),
            ModelCheckpoint(folder, filename="val{step}", every_n_epochs=1, save_on_train_epoch_end=False, **keep),
            AtEpochEnd(folder, filename="epoch{step}", every_n_epochs=1, save_on_train_epoch_end=True, **keep),
        )
    fitted = trainer(
        recorder,
        SkipNonFiniteSteps(),
        *callbacks,
        enable_checkpointing=folder is not None,
        plugins=[AtomicCheckpointIO()],
        **{"max_epochs": EPOCHS, "num_sanity_val_steps": 0} | options,
    )
    fitted.fit(module, data, ckpt_path=resume)
    state = {"module": module.state_dict(), "optimizer": fitted.optimizers[0].state_dict()["state"]}
    state["schedule"] = fitted.lr_scheduler_configs[0].scheduler.last_epoch
    return recorder, state, fitted.global_step


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    return found == expected


CASES = [
    ("albef", {"val_check_interval": 2, "accumulate_grad_batches": 2}),
    ("albef", {"limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 1}),
    ("albef", {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    ("albef_vqa", {"val_check_interval": 3}),
    ("cocord", {"accumulate_grad_batches": 3}),
    ("shre", {"check_val_every_n_epoch": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), CASES, ids=lambda value: str(value))
def test_a_run_resumes_exactly_from_every_checkpoint(tmp_path, method, options):
    outside = (METHODS | OTHERS)[method].prepare(tmp_path)
    whole, state, steps = fit(method, outside, 1, options, folder=tmp_path / "run")
    assert whole.measured
    checkpoints = sorted((tmp_path / "run").glob("*.ckpt"))
    assert len([path for path in checkpoints if path.name.startswith("step")]) == steps
    for path in checkpoints:
        loops = torch.load(path, weights_only=True)["loops"]["fit_loop"]
        done = loops["epoch_loop.batch_progress"]["total"]["processed"]
        found, end, reached = fit(method, outside, 77, options, resume=path)
        assert reached == steps, path.name
        assert found.samples == {number: rows for number, rows in whole.samples.items() if number >= done}, path.name
        # That of the checkpoint's last batch is still to come where the checkpoint is older.
        first = done if path.name.startswith("step") else done + 1
        assert found.measured == {number: row for number, row in whole.measured.items() if number >= first}, path.name
        assert same(end, state), path.name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"min_epochs": 3}], ids=str)
def test_a_run_that_ends_early_ends_alike_from_every_checkpoint(tmp_path, options):
    def stop():
        return EarlyStopping("val/recall_mean", patience=1, mode="max", min_delta=1000.0)  # after two validations

    options = {"max_epochs": 4} | options
    whole, state, steps = fit("albef", None, 1, options, stop(), folder=tmp_path)
    assert steps < 16
    for path in sorted(tmp_path.glob("*.ckpt")):
        found, end, reached = fit("albef", None, 77, options, stop(), resume=path)
        assert reached == steps, path.name
        assert same(end, state), path.name
        assert found.samples.items() <= whole.samples.items(), path.name


@pytest.mark.parametrize("method", METHODS | OTHERS)
def test_float64_is_not_rounded_by_a_resume(tmp_path, method):
    outside = (METHODS | OTHERS)[method].prepare(tmp_path)
    options = {"precision": "64-true", "max_steps": 2, "limit_val_batches": 0}
    _, state, _ = fit(method, outside, 1, options, folder=tmp_path / "run")
    _, end, _ = fit(method, outside, 77, options, resume=tmp_path / "run" / "step1.ckpt")
    assert same(end, state)


class InValidation(Callback):
    """Sends a signal in the first batch of the first validation."""

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == 3 and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.fault(
    "stopped in a validation between two accumulated batches",
    "SIGTERM in its first batch",
    "stops after their step, and goes on exactly",
)
def test_a_stop_between_accumulated_batches_completes_their_step(tmp_path):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    with pytest.warns(match="gradients are in no checkpoint.*a multiple of 2 batches"):
        whole, state, steps = fit("albef", None, 1, options)
    with pytest.raises(SystemExit, match="143"):
        fit("albef", None, 1, options, InValidation(), StopOnSignal(str(tmp_path)))
    path = tmp_path / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 2
    found, end, reached = fit("albef", None, 77, options, resume=path)
    assert (reached, min(found.samples)) == (steps, 4)
    assert found.measured == {number: row for number, row in whole.measured.items() if number > 3}
    assert same(end, state)
