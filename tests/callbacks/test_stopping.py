"""A training that receives a signal stops with a checkpoint, and the resumed run equals the uninterrupted one."""

import os
import signal

import pytest
import torch
from lightning import Callback

from support.methods.albef import IMAGE_SIZE, tiny_albef
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from support.runs.resume import assert_same_end, run
from vlightning.callbacks import StopOnSignal, rank
from vlightning.datamodules import ShapesDataModule


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = {}

    def whole_run(accumulate):
        if accumulate not in runs:
            runs[accumulate] = tmp_path_factory.mktemp("whole")
            run(runs[accumulate], "albef", 1, accumulate=accumulate, workers=1)
        return runs[accumulate]

    return whole_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "hook", "batch", "accumulate", "stopped_after"),
    [
        pytest.param("SIGUSR1", 138, "on_train_batch_start", 5, 2, 6, id="in the first of two batches of a step"),
        pytest.param("SIGINT", 130, "on_train_batch_end", 8, 1, 8, id="in the last batch of an epoch"),
        pytest.param("SIGTERM", 143, "on_train_epoch_start", 8, 1, 9, id="between epochs"),
    ],
)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_run(
    tmp_path, uninterrupted, name, status, hook, batch, accumulate, stopped_after
):
    whole = uninterrupted(accumulate)
    options = {"accumulate": accumulate, "workers": 1}
    run(tmp_path, "albef", 1, send=(name, hook, batch), status=status, **options)
    assert sorted(path.name for path in tmp_path.glob("last*.ckpt")) == ["last.ckpt"]
    progress = torch.load(tmp_path / "last.ckpt", weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["total"]["ready"] == stopped_after
    assert not (tmp_path / "final.ckpt").exists()
    run(tmp_path, "albef", 2, resume=str(tmp_path / "last.ckpt"), **options)
    assert_same_end(whole, tmp_path)


class ToOneProcess(Callback):
    """Sends SIGTERM to one process of two, in a hook, after so many steps."""

    def __init__(self, hook, step):
        def send(trainer, *_):
            if trainer.global_step == step and rank() == 1 and not trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(self, hook, send)


def train(kind, folder, hook=None, resume=False, seed=0):
    torch.manual_seed(seed)
    sizes = {"image_size": IMAGE_SIZE, "length": 32, "eval_length": 8, "batch_size": 4, "max_tokens": 16}
    data = ShapesDataModule(**sizes, vocab_size=200, seed=0)
    sender = [ToOneProcess(hook, 4)] if hook else []
    callbacks, files = [*sender, StopOnSignal(str(folder))], {"enable_checkpointing": True, "default_root_dir": folder}
    fitted = rank_trainer(kind, max_epochs=2, callbacks=callbacks, **files)
    module = tiny_albef(seed, text={"vocab_size": 200})
    try:
        fitted.fit(module, data, ckpt_path=folder / "last.ckpt" if resume else None, weights_only=True)
    except SystemExit as stop:
        return stop.code, fitted.global_step
    return whole_state(module)


STOPS = {"on_before_zero_grad": 5, "on_validation_batch_end": 4}
"""A hook that sends the signal, and the number of steps after which the run stops."""


def on_rank(kind, folder):
    """Return the state of an uninterrupted run, and by hook how a run stopped and its state once resumed."""
    whole, stopped = train(kind, folder / "whole"), {}
    for number, hook in enumerate(STOPS, 1):
        stopped[hook] = train(kind, folder / hook, hook), train(kind, folder / hook, resume=True, seed=number)
    return whole, stopped


@pytest.mark.fault(
    "one of two processes is sent SIGTERM",
    "os.kill in a step and in validation",
    "all stop at the same step, and go on exactly",
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_all_processes_stop_when_one_gets_a_signal_and_resume_together(tmp_path, kind):
    ranks = run_distributed(on_rank, kind, tmp_path, timeout=300)
    for hook, steps in STOPS.items():
        assert [stopped[hook][0] for _, stopped in ranks] == [(143, steps)] * 2
        whole, found = ranks[0][0], ranks[0][1][hook][1]
        for name, value in whole.items():
            assert torch.equal(found[name], value), (hook, name)
