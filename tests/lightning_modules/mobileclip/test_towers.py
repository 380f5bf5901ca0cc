"""Towers alone have the features of the model, in every precision."""

import pytest
import torch

from support.methods.towers import batch, features, plain_clip, smallest_cosine, trained
from vlightning.lightning_modules.networks.clip.towers import towers

MODELS = ["MobileCLIP-tiny", "MobileCLIP-S0", "MobileCLIP-B"]


# Rounding weights to bfloat16 alone costs a tower of many convolutions 5e-4.
@pytest.mark.parametrize(("dtype", "image_bound"), [(torch.float16, 0.9995), (torch.bfloat16, 0.998)])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_features_are_close(name, dtype, image_bound):
    model = trained(name)
    images, ids = batch(model, 4)
    expected = features(model, images, ids)
    for fused in (True, False):
        image, text = towers(model, fused=fused, dtype=dtype)
        assert {parameter.dtype for tower in (image, text) for parameter in tower.parameters()} == {dtype}
        found = image(images), text(ids)
        assert {feature.dtype for feature in found} == {dtype}
        assert smallest_cosine(found[0], expected[0]) > image_bound
        assert smallest_cosine(found[1], expected[1]) > 0.9995
        for feature in found:
            torch.testing.assert_close(feature.float().norm(dim=1), torch.ones(4), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_that_cast_only_their_input_support_half_precision(dtype):
    model = plain_clip(cast_dtype=torch.float16)  # as open_clip makes its half-precision models
    inputs = batch(model, 4, 32)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        features(plain_clip(cast_dtype=torch.float16).to(dtype), inputs[0].to(dtype), inputs[1])
    for tower, right, given in zip(towers(model, dtype=dtype), features(model, *inputs), inputs, strict=True):
        assert smallest_cosine(tower(given), right) > 0.9995


@pytest.mark.parametrize("fused", [True, False])
def test_towers_are_copies(fused):
    model = plain_clip(init_logit_bias=0.5).requires_grad_(True)
    names = list(model.state_dict())
    image, text = towers(model, fused, dtype=torch.bfloat16)
    assert list(model.state_dict()) == names
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for tower in (image, text) for parameter in tower.parameters())
    kept = [name.split(".", 1)[1] for name in text.state_dict()]
    assert sorted([*kept, *image.state_dict()]) == sorted(set(names) - {"logit_scale", "logit_bias"})
