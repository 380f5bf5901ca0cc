"""The step against numbers of the reference: features, logits, losses, gradients, and the state after it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from support.devices.devices import DEVICES, TOLERANCE, moved, whole_float32  # noqa: F401, a fixture
from support.methods.albef import load_official
from vlightning.callbacks import EMACallback
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef import itc, itm, mlm
from vlightning.lightning_modules.albef import module as step
from vlightning.lightning_modules.albef.official import official_name, to_official

GOLDEN = Path(__file__).parents[2] / "golden"
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _golden(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118


@pytest.fixture(scope="module")
def golden():
    return _golden("albef_pretrain")


@pytest.fixture
def module(golden):
    return _module(*golden)


def _module(tensors, config, positives="diagonal", mlm=True):
    module = ALBEFModule(
        vision={
            "image_size": config["image_size"],
            "patch_size": config["patch_size"],
            "width": config["width"],
            "depth": config["vit_depth"],
            "heads": config["heads"],
            "mlp_ratio": config.get("mlp_ratio_vit", 4.0),
        },
        text={
            "vocab_size": config["vocab_size"],
            "max_positions": 64,
            "width": config["width"],
            "heads": config["heads"],
            "ffn_width": config["intermediate_size"],
            "depth": config["fusion_layer"],
            "fusion_depth": config["bert_layers"] - config["fusion_layer"],
        },
        contrast={
            "embed_dim": config["embed_dim"],
            "queue_size": config["queue_size"],
            "queue_start": "random",
            "positives": positives,
            "key_columns": "local",
        },
        momentum={"momentum": config["momentum"]},
        mlm=mlm,
    )
    load_official(module, _part(tensors, "state."))
    return module.eval()


def _part(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _inject(monkeypatch, module, tensors):
    """Put the reference's draws and alpha in, and record what the losses are given."""
    if module.mlm:
        labels = tensors["draw.mlm_labels"].flatten()
        positions = (labels != -100).nonzero().squeeze(1)
        masked = mlm.MaskedTokens(tensors["draw.masked_input_ids"], positions, labels[positions])
        monkeypatch.setattr(step, "draw_masked_tokens", lambda *_: masked)
    drawn = iter([tensors["draw.negative_image_index"], tensors["draw.negative_text_index"]])
    monkeypatch.setattr(
        itm, "draw_hard_negatives", lambda *_: itm.Negatives(i := next(drawn), torch.ones_like(i, dtype=bool))
    )
    monkeypatch.setattr(module, "current_alpha", lambda: tensors["in.alpha"].item())
    seen = {}
    for part, name in ((itc, "itc_loss"), (itm, "itm_loss"), (mlm, "mlm_loss")):
        original = getattr(part, name)

        def record(*args, name=name, original=original):
            seen[name] = (args, original(*args))
            return seen[name][1]

        monkeypatch.setattr(part, name, record)
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("whole_float32")
def test_step_equals_the_reference(golden, module, monkeypatch, device):
    tensors, module = moved(golden[0], device), module.to(device)
    seen = _inject(monkeypatch, module, tensors)
    EMACallback(module.momentum_pairs(), log=False).update(module)  # the reference moves its teacher first
    batch = _part(tensors, "in.")
    batch["image_id"] = torch.arange(4, device=device)

    outputs = module.training_step(batch, 0)
    outputs["loss"].backward()

    close = {"rtol": TOLERANCE[device], "atol": TOLERANCE[device]}
    image_features, text_features = module(batch)
    torch.testing.assert_close(image_features, tensors["out.image_feat"], **close)
    torch.testing.assert_close(text_features, tensors["out.text_feat"], **close)
    torch.testing.assert_close(outputs["keys"]["image"], tensors["out.image_feat_m"], **close)
    torch.testing.assert_close(outputs["keys"]["text"], tensors["out.text_feat_m"], **close)
    torch.testing.assert_close(seen["itm_loss"][0][0], tensors["out.itm_logits"], **close)
    for name in ("itc", "itm", "mlm"):
        torch.testing.assert_close(seen[f"{name}_loss"][1], tensors[f"out.loss_{name}"], **close)

    _compare_gradients(module, tensors)


def _compare_gradients(module, tensors):
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    gradients = {official_name(name, flat=not module.mlm): gradient for name, gradient in gradients.items()}
    gradients["temp"] = gradients["temp"].squeeze(0)
    expected = _part(tensors, "grad.")
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-8)
        # A key bias shifts all logits of a query alike, so its true gradient is 0 and both sides hold rounding noise.
        if not name.endswith("key.bias"):
            assert error < 1e-4, (name, error)
        else:
            assert gradient.abs().max() < (1e-5 if gradient.is_cuda else 1e-6), name


@pytest.mark.parametrize("device", DEVICES)
def test_losses_in_bf16_are_close_to_the_reference(golden, module, monkeypatch, device):
    tensors, module = moved(golden[0], device), module.to(device)
    seen = _inject(monkeypatch, module, tensors)
    EMACallback(module.momentum_pairs(), log=False).update(module)
    batch = _part(tensors, "in.") | {"image_id": torch.arange(4, device=device)}
    with torch.autocast(device, torch.bfloat16):
        module.training_step(batch, 0)
    for name in ("itc", "itm", "mlm"):
        torch.testing.assert_close(seen[f"{name}_loss"][1], tensors[f"out.loss_{name}"], rtol=0.02, atol=0.02)


def test_step_leaves_teacher_queues_and_pointer_as_the_reference(golden, module, monkeypatch):
    tensors, _ = golden
    _inject(monkeypatch, module, tensors)
    EMACallback(module.momentum_pairs(), log=False).update(module)
    batch = _part(tensors, "in.") | {"image_id": torch.arange(4)}
    outputs = module.training_step(batch, 0)
    keys = outputs["keys"]
    for name, queue in module.queues().items():
        queue.enqueue(keys[name], queue.fitting_ids(batch["image_id"]))
    state = to_official(module)
    for name, expected in _part(tensors, "after.").items():
        torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_retrieval_step_and_the_state_after_it_equal_the_reference(monkeypatch):
    tensors, config = _golden("albef_retrieval_dev")
    module = _module(tensors, config, "image_id", mlm=False)
    assert all(torch.equal(value, tensors[f"state.{name}"]) for name, value in to_official(module).items())
    seen = _inject(monkeypatch, module, tensors)
    EMACallback(module.momentum_pairs(), log=False).update(module)
    batch = _part(tensors, "in.")

    outputs = module.training_step(batch, 0)
    outputs["loss"].backward()

    for name in ("itc", "itm"):
        torch.testing.assert_close(seen[f"{name}_loss"][1], tensors[f"out.loss_{name}"], **CLOSE)
    torch.testing.assert_close(outputs["loss"], tensors["out.loss"], **CLOSE)
    _compare_gradients(module, tensors)
    for name, queue in module.queues().items():
        queue.enqueue(outputs["keys"][name], queue.fitting_ids(batch["image_id"]))
    state = to_official(module)
    for name, expected in _part(tensors, "after.").items():
        torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
