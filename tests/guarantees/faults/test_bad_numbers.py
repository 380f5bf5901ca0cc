"""A training step with a non-finite loss does not change the state of any method."""

import pytest
import torch
from lightning import Callback

from support.methods.methods import METHODS
from support.methods.tiny_modules import trainer
from vlightning.callbacks import SkipNonFiniteSteps

BAD = 2


class Poison(Callback):
    """Sets one value of one image of a batch to NaN, and records the states between steps."""

    def __init__(self):
        self.states = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.states.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        if batch_idx == BAD:
            batch["image"][1, 0, 0, 0] = torch.nan

    def on_train_end(self, trainer, pl_module):
        self.states.append(pl_module.state_dict())


@pytest.mark.fault(
    "NaN in an image", "one number of one batch", "skipped: nothing that is kept has moved, queues neither"
)
@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_step_changes_no_weights_averages_queues_and_statistics(tmp_path, method):
    module, data = METHODS[method].build(METHODS[method].prepare(tmp_path), seed=0, batch_size=8, num_workers=0)
    poison, skip = Poison(), SkipNonFiniteSteps()
    fitted = trainer(poison, skip, max_steps=4, max_epochs=-1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.warns(match=r"Step 3 was skipped \(1 of at most 10\)"):
        fitted.fit(module, data)
    assert (fitted.global_step, skip.skipped_steps) == (4, 1)
    before, after, end = poison.states[BAD:]
    for name, value in before.items():
        assert torch.equal(after[name], value), name
        assert value.isfinite().all(), name
    for part in METHODS[method].state:
        names = [name for name in after if name.startswith(part)]
        assert any(not torch.equal(after[name], end[name]) for name in names), part
