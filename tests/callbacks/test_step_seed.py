import random

import pytest
import torch
from lightning.pytorch import seed_everything

from support.methods.tiny_modules import Student, loader, trainer
from support.runs.distributed import run_ddp_fit
from vlightning.callbacks import StepSeedCallback


class Draws(Student):
    """Draws in every step, in validation and at the start of an epoch; keeps what the training steps drew."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn.append((torch.rand(()).item(), random.random()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        torch.rand(7)
        random.random()


def drawn(*callbacks, batches=4, validate=False, ckpt_path=None, **kwargs):
    module = Draws()
    run = trainer(*callbacks, **kwargs)
    run.fit(module, loader(batches), loader(2) if validate else None, ckpt_path=ckpt_path)
    return module.drawn, run


def test_draws_are_a_function_of_seed_and_batch():
    torch.manual_seed(1)
    first, _ = drawn(StepSeedCallback(5), max_epochs=2)
    torch.manual_seed(2)
    random.seed(2)
    again, _ = drawn(StepSeedCallback(5), max_epochs=2)
    assert first == again
    assert len(set(first)) == 8  # all batches of all epochs differ
    other, _ = drawn(StepSeedCallback(6), max_epochs=2)
    assert not set(first) & set(other)


def test_validation_and_accumulation_change_nothing():
    plain, _ = drawn(StepSeedCallback(5), max_epochs=2)
    assert drawn(StepSeedCallback(5), max_epochs=2, validate=True, val_check_interval=2)[0] == plain
    assert drawn(StepSeedCallback(5), max_epochs=2, accumulate_grad_batches=3)[0] == plain


class SaveAt(StepSeedCallback):
    def __init__(self, path, seed, batch, hook):
        super().__init__(seed)
        self.path, self.batch, self.hook = path, batch, hook

    def _save(self, trainer):
        if len(trainer.lightning_module.drawn) == self.batch:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, *args):
        if self.hook == "batch":
            self._save(trainer)

    def on_validation_batch_start(self, trainer, *args):
        if self.hook == "validation" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_epoch_end(self, trainer, *args):
        if self.hook == "epoch":
            self._save(trainer)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("batch", "hook"),
    [(2, "batch"), (3, "batch"), (4, "batch"), (6, "batch"), (4, "validation"), (4, "epoch"), (8, "epoch")],
)
def test_a_resumed_run_repeats_the_draws_of_the_uninterrupted_run(tmp_path, batch, hook, accumulate):
    kwargs = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "validate": True}
    straight, _ = drawn(SaveAt(tmp_path / "x.ckpt", 5, batch, hook), **kwargs)
    assert len(straight) == 12
    resumed, _ = drawn(SaveAt(None, 5, -1, hook), ckpt_path=tmp_path / "x.ckpt", **kwargs)
    assert resumed == straight[batch:]


def test_the_seed_of_the_run_is_that_of_seed_everything(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert StepSeedCallback().seed == 0
    callback = StepSeedCallback()
    monkeypatch.setenv("PL_GLOBAL_SEED", "23")
    assert callback.seed == 23
    assert StepSeedCallback(4).seed == 4
    seed_everything(9)
    assert drawn(StepSeedCallback())[0] == drawn(StepSeedCallback(9))[0]


def test_the_seed_of_the_checkpoint_overrides_with_a_warning(tmp_path):
    straight, _ = drawn(StepSeedCallback(5), max_epochs=2)
    _, run = drawn(StepSeedCallback(5), max_epochs=1)
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert {"seed": 5, "processes": 1} in torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"].values()
    with pytest.warns(UserWarning, match="started with seed 5, this one with 6: using 5"):
        resumed, _ = drawn(StepSeedCallback(6), max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    assert resumed == straight[4:]


def make():
    return Draws(), loader(4)


def collect(run):
    return run.lightning_module.drawn


def test_ranks_draw_differently_and_repeatably():
    first = run_ddp_fit(make, {"callbacks": [StepSeedCallback(5)], "max_epochs": 2}, collect=collect)
    assert len({draw for rank in first for draw in rank}) == 8
    assert run_ddp_fit(make, {"callbacks": [StepSeedCallback(5)], "max_epochs": 2}, collect=collect) == first
    assert first[0] == drawn(StepSeedCallback(5), batches=2, max_epochs=2)[0]  # rank 0 is the single process
