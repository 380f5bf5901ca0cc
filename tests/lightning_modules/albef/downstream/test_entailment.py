"""Visual entailment against numbers of the reference, and against a slow reference."""

import pytest
import torch

from support.methods import golden_tasks
from vlightning.lightning_modules import EntailmentModule
from vlightning.lightning_modules.albef.official import to_official


@pytest.fixture(scope="module")
def golden():
    return golden_tasks.read("ve")


@pytest.mark.parametrize("memory", [{}, {"micro_batch_size": 3, "activation_checkpointing": True}])
def test_step_equals_the_reference(golden, tmp_path, monkeypatch, memory):
    tensors, config = golden
    module = golden_tasks.built(EntailmentModule, tensors, config, tmp_path, memory=memory)
    batch = golden_tasks.part(tensors, "in.")
    torch.testing.assert_close(
        module(batch["input_ids"], batch["attention_mask"], batch["image"]), tensors["out.logits"], rtol=1e-5, atol=1e-5
    )
    compared = golden_tasks.check_step(module, tensors, batch, monkeypatch)
    assert compared == {name for name in to_official(module) if "_m." not in name and "position_ids" not in name}


def test_the_authors_layout_round_trips(golden, tmp_path):
    tensors, config = golden
    module = golden_tasks.built(EntailmentModule, tensors, config, tmp_path)
    written, expected = to_official(module), golden_tasks.part(tensors, "state.")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
