"""Two processes, with DDP and sharded, train as one process, and measure the same accuracy."""

import pytest
import torch
from lightning import Callback

from support.methods.tasks import KINDS, task_and_data
from support.methods.tiny_modules import trainer as alone
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from vlightning.callbacks import world_size

STEPS = 4


class Double(Callback):
    """Gives images the type of the networks."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch |= {name: value.double() for name, value in batch.items() if value.is_floating_point()}

    on_validation_batch_start = on_train_batch_start


def _fitted(name, kind=None):
    torch.set_default_dtype(torch.float64)
    processes = world_size() if kind else 1
    changes = {"text": {"dropout": 0.0}, "optim": {"learning_rate": 0.01}}
    module, data = task_and_data(name, 0, changes, batch_size=8 // processes, num_workers=0, eval_length=11)
    configure = module.configure_model
    module.configure_model = lambda: (module.double(), configure())
    options = {"max_steps": STEPS, "callbacks": [Double()], "num_sanity_val_steps": 0}
    if kind is None:
        callbacks = options.pop("callbacks")
        fitted = alone(*callbacks, **options, max_epochs=None)
    else:
        fitted = rank_trainer(kind, **options)
    fitted.fit(module, data)
    metrics = {key: float(value) for key, value in fitted.callback_metrics.items() if key.startswith("val/")}
    return whole_state(module), metrics


def _both(name):
    return [_fitted(name, kind) for kind in ("ddp", "sharded")]


@pytest.mark.parametrize("name", [name for name in KINDS if name != "assignment"])  # its negatives are of a process
def test_two_processes_train_as_one(name):
    try:
        state, metrics = _fitted(name)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(metrics) == {"val/accuracy", "val/loss"}
    for rank in run_distributed(_both, name):
        for found, measured in rank:
            assert measured.keys() == metrics.keys()
            assert measured["val/accuracy"] == pytest.approx(metrics["val/accuracy"])
            assert measured["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)
            for key, tensor in state.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")


def test_sharded_text_assignment_trains_as_ddp():
    for (plain, _), (sharded, _) in run_distributed(_both, "assignment"):
        for key, tensor in plain.items():
            torch.testing.assert_close(sharded[key], tensor, rtol=1e-6, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")
