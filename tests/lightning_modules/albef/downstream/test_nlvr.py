"""NLVR2 against numbers of the reference, and against a slow reference."""

import pytest
import torch

from support.methods import golden_tasks
from vlightning.lightning_modules import NLVR2Module
from vlightning.lightning_modules.albef.official import to_official


@pytest.fixture(scope="module")
def golden():
    return golden_tasks.read("nlvr")


def _built(golden, tmp_path, **arguments):
    tensors, config = golden
    config = config | {"bert_layers": 12}
    return golden_tasks.built(NLVR2Module, tensors, config, tmp_path, **arguments)


def _batch(tensors):
    batch = golden_tasks.part(tensors, "in.")
    batch["image_left"], batch["image_right"] = batch["image"].chunk(2)  # all left, then all right
    return batch


def test_step_equals_the_reference(golden, tmp_path, monkeypatch):
    tensors, _ = golden
    module, batch = _built(golden, tmp_path), _batch(golden[0])
    logits = module(batch["input_ids"], batch["attention_mask"], batch["image_left"], batch["image_right"])
    torch.testing.assert_close(logits, tensors["out.logits"], rtol=1e-5, atol=1e-5)
    golden_tasks.check_step(module, tensors, batch, monkeypatch)


def test_the_authors_layout_round_trips(golden, tmp_path):
    tensors, _ = golden
    written, expected = to_official(_built(golden, tmp_path)), golden_tasks.part(tensors, "state.")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
