"""CoCoRD's losses against sums written out, and at their known values."""

import math

import pytest
import torch

from vlightning.lightning_modules.cocord.losses import contrastive_loss, prediction_loss
from vlightning.lightning_modules.losses.soft_targets import posterior_divergence


def vectors(rows, seed, width=6):
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("temperature", [0.1, 0.07, 1.0])
def test_contrast_is_the_softmax_over_positive_and_filled_slots(temperature):
    query, key = vectors(3, 0), vectors(3, 1)
    dictionary = torch.nn.functional.normalize(vectors(4, 2), dim=1)
    valid = torch.tensor([True, True, False, True])
    expected = 0.0
    for q, k in zip(query, key, strict=True):
        negatives = [math.exp(cosine(q, d) / temperature) for d, there in zip(dictionary, valid, strict=True) if there]
        positive = math.exp(cosine(q, k) / temperature)
        expected -= math.log(positive / (positive + sum(negatives))) / len(query)
    found = contrastive_loss(query, key, dictionary, valid, temperature)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_contrast_without_any_negative_is_zero():
    found = contrastive_loss(vectors(3, 0), vectors(3, 1), torch.zeros(4, 6), torch.zeros(4, dtype=torch.bool), 0.1)
    assert float(found) == 0.0


def test_contrast_of_unrelated_vectors_is_near_the_logarithm_of_all():
    wide = 2048
    dictionary = torch.nn.functional.normalize(torch.randn(2048, wide), dim=1)
    loss = contrastive_loss(
        torch.randn(64, wide), torch.randn(64, wide), dictionary, torch.ones(2048, dtype=torch.bool), 0.1
    )
    assert float(loss) == pytest.approx(math.log(2049), abs=0.1)


def test_prediction_is_zero_for_equal_and_four_for_opposite_directions():
    target = vectors(3, 0)
    assert float(prediction_loss(5 * target, target)) == pytest.approx(0, abs=1e-12)
    assert float(prediction_loss(-2 * target, target)) == pytest.approx(4, abs=1e-12)
    other = vectors(3, 1)
    mean = sum(2 - 2 * cosine(o, t) for o, t in zip(other, target, strict=True)) / 3
    assert float(prediction_loss(other, target)) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("loss", ["contrast", "prediction", "distillation"])
def test_half_precision_is_raised_before_norms_and_softmax(loss):
    a, b = vectors(4, 0).bfloat16(), vectors(4, 1).bfloat16()
    dictionary = torch.nn.functional.normalize(vectors(4, 2), dim=1).float()
    functions = {
        "contrast": lambda x, y: contrastive_loss(x, y, dictionary, torch.ones(4, dtype=torch.bool), 0.1),
        "prediction": prediction_loss,
        "distillation": lambda x, y: posterior_divergence(x, y, 4.0),
    }
    half, full = functions[loss](a, b), functions[loss](a.float(), b.float())
    assert half.dtype == torch.float32
    assert half == full
