"""Bytes and operations of a step under fake tensors equal those of the real step."""

import pytest
import torch
from formulas import describe
from large_batches import ACTIVATIONS, METHODS, batch, ready
from memory import held_bytes
from torch import nn

from support.methods.methods import OTHERS
from support.methods.random_batches import NAMES, random_rows, small
from support.methods.tasks import KINDS, tiny_task
from vlightning.commands.plan.counted_step import (
    count_step,
    fake_tensors,
    make_fake,
    optimizer_bytes,
)
from vlightning.commands.plan.estimate import estimate, sizes_of
from vlightning.commands.plan.module import has_plan, pretend_run

ROWS = 48  # activations exceed the rest
SLICE = 64  # the least batch that is counted


def prepared(name, folder):
    module = small(name, folder, **({"contrast": {"queue_size": ROWS}} if name in ("albef", "cocord") else {}))
    module.setup("fit")
    pretend_run(module)
    module.configure_model()
    return module.train()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_the_counted_bytes(name, tmp_path):
    module, batch = prepared(name, tmp_path), random_rows(name, ROWS)

    def step():
        result = module.training_step(batch, 0)
        (result["loss"] if isinstance(result, dict) else result).backward()

    step()  # creates the gradients
    held = held_bytes(step).most
    optimizer = optimizer_bytes(module)
    with fake_tensors():
        make_fake(module)
        batch = {key: torch.empty_like(value, device="cpu") for key, value in batch.items()}
        found = count_step(module, batch, cuda=False)
        assert optimizer_bytes(module) == optimizer
    assert found.peak == pytest.approx(held, rel=0.1)
    assert found.activations <= found.peak <= found.activations + found.logits
    print(name, found, held)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mmlg", "mobileclip", "shre"])
def test_a_plan_in_slices_is_that_of_a_batch_of_many(name, tmp_path):
    """A batch of one slice has no gradients to add to: with it among the three, a plan of many is far too low."""
    data = {"image_size": 16, "max_tokens": 6}

    def in_slices():
        module = small(name, tmp_path, memory={"micro_batch_size": SLICE})
        module.setup("fit")
        pretend_run(module)
        module.configure_model()
        return module.train()

    planned = estimate(in_slices(), data).memory(10 * SLICE, sharded=False)["activations"]
    module = in_slices()
    with fake_tensors():
        make_fake(module)
        counted = count_step(module, module.example_batch(10 * SLICE, data)).activations
    assert planned == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("name", [*KINDS, "albef_vqa"])
def test_a_step_of_a_task_takes_the_counted_bytes(name):
    module = (
        tiny_task(name) if name in KINDS else OTHERS[name].build(None, 0, {"memory": {"micro_batch_size": None}})[0]
    )
    assert has_plan(type(module))
    pretend_run(module)
    module.train()
    batch = module.example_batch(8 * ROWS, {"max_tokens": 12, "questions_per_image": 2})

    def step():
        module.training_step(batch, 0).backward()

    step()
    held = held_bytes(step).most
    with fake_tensors():
        make_fake(module)
        found = count_step(module, {key: torch.empty_like(value) for key, value in batch.items()}, cuda=False)
    assert found.peak == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "SHRe"])
def test_a_counted_step_at_full_size_is_that_of_the_document(name):
    """SHRe's is compared through the command line; the document's activations were measured in steps of four pairs."""
    with torch.device("meta"):
        module = METHODS[name]()
    pretend_run(module)
    method, rows = describe(ready(module)), 64
    with fake_tensors():
        make_fake(module)
        found = count_step(module, batch(name, rows), cuda=False)
        sizes = sizes_of(module)
    assert (sizes.parameters, sizes.optimizer) == (method.trained, method.moments * method.trained)
    assert (sizes.averages, sizes.frozen) == (method.averaged, method.frozen)
    assert found.activations == pytest.approx(ACTIVATIONS[name].all * rows, rel=0.15)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 30, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch["image"]).square().mean()


def test_a_linear_layer_takes_four_operations_a_weight_and_row():
    with fake_tensors():
        found = count_step(Linear(), {"image": torch.empty(7, 10)})
    assert found.flops == 2 * 2 * 7 * 10 * 30  # forward, and the gradient of the weight
