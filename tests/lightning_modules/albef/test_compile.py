import pytest
import torch
from lightning import Trainer

from support.methods.albef import pairs_loader, tiny_albef


@pytest.mark.slow
def test_a_compiled_module_trains_to_the_same_weights():
    """`eager` traces, guards and recompiles as every backend does, and runs the traced graphs without a compiler."""
    states = []
    for compiled in (False, True):
        torch._dynamo.utils.counters.clear()
        module = tiny_albef(vision={"depth": 1}, text={"dropout": 0.0})
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=2
        )
        torch.manual_seed(0)
        trainer.fit(torch.compile(module, backend="eager") if compiled else module, pairs_loader(24, 8))
        states.append(module.state_dict())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6, msg=name)
