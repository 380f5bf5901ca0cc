"""The step against the plain formulation, whole and in micro-batches: losses and gradients in float64."""

import pytest
import torch

from support.methods.albef import random_batch, tiny_albef
from support.methods.plain_albef import PlainALBEF

PAIRS = 8


def _module(**changes):
    module = tiny_albef(0, changes, text={"dropout": 0.0, "depth": 2, "fusion_depth": 2}).double().train()
    generator = torch.Generator().manual_seed(5)
    for queue in module.queues().values():
        features = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        queue.enqueue(torch.nn.functional.normalize(features, dim=-1), queue.fitting_ids(torch.arange(2, 8)))
    with torch.no_grad():
        for parameter in module.teacher.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def _batch():
    batch = random_batch(PAIRS, dtype=torch.float64)
    batch["image_id"][1] = batch["image_id"][0]  # an image twice
    return batch


def _gradients(module, loss):
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def _plain():
    module = _module()
    torch.manual_seed(7)
    losses, image_keys, text_keys = PlainALBEF(module).losses(_batch(), alpha=0.4)
    return losses, (image_keys, text_keys), _gradients(module, sum(losses.values()))


def _ours(monkeypatch, **changes):
    module = _module(**changes)
    logged = {}
    monkeypatch.setattr(module, "current_alpha", lambda: 0.4)
    monkeypatch.setattr(module, "log_dict", lambda values, **_: logged.update(values))
    torch.manual_seed(7)
    outputs = module.training_step(_batch(), 0)
    losses = {name: logged[f"train/loss_{name}"] for name in ("itc", "itm", "mlm")}
    return losses, tuple(outputs["keys"].values()), _gradients(module, outputs["loss"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": {"micro_batch_size": 1}},
        {"memory": {"micro_batch_size": 3}},
        {"memory": {"micro_batch_size": PAIRS}},
        {"memory": {"activation_checkpointing": True}},
        {"memory": {"activation_checkpointing": True, "micro_batch_size": 4}},
    ],
    ids=str,
)
def test_losses_keys_and_gradients_equal_the_plain_step(monkeypatch, changes):
    expected_losses, expected_keys, expected_gradients = _plain()
    losses, keys, gradients = _ours(monkeypatch, **changes)
    for name, value in expected_losses.items():
        torch.testing.assert_close(losses[name], value.detach(), rtol=1e-10, atol=0, msg=name)
    for key, expected in zip(keys, expected_keys, strict=True):
        torch.testing.assert_close(key, expected, rtol=1e-10, atol=1e-12)
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_are_exact(monkeypatch, checkpointing):
    whole, _, gradients = _ours(monkeypatch)
    sliced, _, sliced_gradients = _ours(
        monkeypatch, memory={"micro_batch_size": 3, "activation_checkpointing": checkpointing}
    )
    for name, value in whole.items():
        torch.testing.assert_close(sliced[name], value, rtol=1e-12, atol=0, msg=name)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sliced_gradients[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
