"""A reparameterized model computes the same features with fewer layers."""

import copy

import pytest
import torch
from timm.models.fastvit import MobileOneBlock
from timm.utils import reparameterize_model

from support.methods.mobileclip import build_shallow, settle
from vlightning.common.errors import UserError
from vlightning.lightning_modules.networks.clip import reparameterize as module_under_test
from vlightning.lightning_modules.networks.clip.models import PRESETS, build_model
from vlightning.lightning_modules.networks.clip.reparameterize import norms_left, reparameterize

VENDOR = {  # image tower without the bias of timm's projection, text tower, norms that the vendor's code leaves
    "MobileCLIP-S0": (11_356_992, 42_435_072, 24),
    "MobileCLIP-S1": (21_460_544, 63_428_096, 44),
    "MobileCLIP-S2": (35_702_480, 63_428_096, 48),
    "MobileCLIP-B": (86_348_544, 63_428_096, 2),
}


SIZE = 64


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 49406, (2, 77), generator=generator)
    ids[:, 40] = 49407
    return torch.rand(2, 3, SIZE, SIZE, generator=generator, dtype=dtype), ids


def outputs(model, image, ids):
    with torch.no_grad():
        return model.encode_image(image, normalize=True), model.encode_text(ids, normalize=True)


@pytest.mark.parametrize("name", VENDOR)
def test_counts_equal_the_vendors_and_no_norm_is_left(name, monkeypatch):
    monkeypatch.setattr(module_under_test, "_compare", lambda before, after: None)  # there are no values to compare
    with torch.device("meta"):
        branches = reparameterize(build_model(name).eval(), "branches")
        fused = reparameterize(branches)
    image, text, norms = VENDOR[name]
    count = sum(parameter.numel() for parameter in branches.visual.parameters())
    assert count - PRESETS[name].embed_dim == image
    assert sum(parameter.numel() for parameter in branches.text.parameters()) == text
    assert len(norms_left(branches)) == norms
    assert norms_left(fused) == []


@pytest.mark.parametrize("name", VENDOR)
def test_features_stay(name):
    model = settle(build_shallow(name, SIZE))
    expected = outputs(model, *inputs())
    for folds in ("branches", "all"):
        for one, two in zip(outputs(reparameterize(model, folds), *inputs()), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["MobileCLIP-S0", "MobileCLIP-B"])
def test_fusing_is_exact_in_float64(name):
    model = settle(build_shallow(name, SIZE).double())
    batch = inputs(torch.float64)
    for one, two in zip(outputs(reparameterize(model), *batch), outputs(model, *batch), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["MobileCLIP-tiny", "MobileCLIP-S0"])
def test_branches_are_fused_as_by_timm(name):
    model = settle((build_model if name == "MobileCLIP-tiny" else build_shallow)(name).double())
    found, expected = reparameterize(model, "branches").state_dict(), reparameterize_model(model).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_fusing_is_idempotent_and_copies_the_model():
    model = settle(build_shallow("MobileCLIP-S0"))
    before = copy.deepcopy(model.state_dict())
    training = [parameter.requires_grad for parameter in model.parameters()]
    once = reparameterize(model)
    twice = reparameterize(once)
    assert once.state_dict().keys() == twice.state_dict().keys()
    assert all(torch.equal(value, twice.state_dict()[name]) for name, value in once.state_dict().items())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert not any(parameter.requires_grad for parameter in once.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == training
    assert any(training)


def test_train_mode_is_refused():
    with pytest.raises(UserError, match=r"BatchNorm layers in train mode .*call eval"):
        reparameterize(build_model("MobileCLIP-tiny").train())


def test_wrong_kernels_raise(monkeypatch):
    model = settle(build_model("MobileCLIP-tiny"))
    right = MobileOneBlock._get_kernel_bias
    monkeypatch.setattr(MobileOneBlock, "_get_kernel_bias", lambda block: [1.01 * part for part in right(block)])
    with pytest.raises(UserError, match=r"differs by at most .* from the original"):
        reparameterize(model)


def test_bfloat16_weights_stay_bfloat16():
    model = settle(build_shallow("MobileCLIP-S0", SIZE))
    fused = reparameterize(copy.deepcopy(model).bfloat16())
    assert {parameter.dtype for parameter in fused.parameters()} == {torch.bfloat16}
    image, ids = inputs()
    expected = outputs(model, image, ids)
    for one, two in zip(outputs(fused, image.bfloat16(), ids), expected, strict=True):
        assert float(torch.nn.functional.cosine_similarity(one.float(), two).min()) > 0.995
