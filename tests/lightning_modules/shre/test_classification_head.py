"""The head is the mean of the patches, a norm and a linear layer."""

import pytest
import torch
from torch import nn

from vlightning.common.errors import UserError
from vlightning.lightning_modules.shre.image_classifier import ClassificationHead


def test_logits_are_a_linear_function_of_the_normalized_mean_of_the_patches():
    torch.manual_seed(0)
    probe, tokens = ClassificationHead(6, 4).double(), torch.randn(3, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    gain, shift, weight, bias = probe.parameters()
    expected = []
    for row in tokens:
        mean = sum(row[1:]) / 4
        normal = (mean - mean.mean()) / (mean.var(unbiased=False) + 1e-6).sqrt() * gain + shift
        expected.append(weight @ normal + bias)
    torch.testing.assert_close(probe(tokens), torch.stack(expected), rtol=1e-10, atol=1e-12)
    tokens[:, 0] = 100.0
    torch.testing.assert_close(probe(tokens), torch.stack(expected), rtol=1e-10, atol=1e-12)


def test_the_probe_has_the_listings_size_and_small_initial_weights():
    probe = ClassificationHead(768, 1000)
    assert sum(parameter.numel() for parameter in probe.parameters()) == 2 * 768 + 768 * 1000 + 1000
    assert probe.norm.eps == 1e-6
    assert not probe.linear.bias.any()
    assert probe.linear.weight.std().item() == pytest.approx(0.02, rel=0.01)
    usual = nn.Linear(768, 1000)
    assert usual.weight.std() > 1.02 * probe.linear.weight.std()


@pytest.mark.parametrize("shape", [(3, 6), (3, 1, 6), (3, 6, 2, 2)])
def test_an_encoder_without_patch_tokens_is_refused(shape):
    with pytest.raises(UserError, match=r"Expected tokens \[B, T, D\] .*, got \[3, .*\]: use"):
        ClassificationHead(6, 4)(torch.zeros(shape))
