"""The divergence from the teacher's posterior, by hand."""

import math

import pytest
import torch

from vlightning.lightning_modules.losses.soft_targets import posterior_divergence
from vlightning.lightning_modules.shre.losses import posterior_entropy


def logits(seed, rows=4, classes=5):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_loss_is_the_divergence_of_teacher_and_student(temperature):
    target, student = logits(0), logits(1)
    expected = reverse = 0.0
    for one, other in zip(target, student, strict=True):
        p, q = (one / temperature).exp(), (other / temperature).exp()
        p, q = p / p.sum(), q / q.sum()
        expected += temperature**2 * float((p * (p / q).log()).sum()) / 4
        reverse += temperature**2 * float((q * (q / p).log()).sum()) / 4
    found = float(posterior_divergence(target, student, temperature))
    assert found == pytest.approx(expected, rel=1e-12)
    assert abs(found - reverse) > 0.01


def test_the_loss_is_zero_for_the_teachers_logits_and_computed_in_float32():
    target = logits(0)
    assert float(posterior_divergence(target, target + 3.0)) == pytest.approx(
        0, abs=1e-12
    )  # a constant does not change the softmax
    halves = target.bfloat16()
    assert posterior_divergence(halves, halves).dtype == torch.float32


def test_only_the_student_has_a_gradient():
    target, student = logits(0).requires_grad_(), logits(1).requires_grad_()
    posterior_divergence(target, student, 2.0).backward()
    assert target.grad is None
    # d/dz T^2 KL = T (q - p), over the rows
    expected = 2.0 * ((student / 2).softmax(-1) - (target / 2).softmax(-1)) / 4
    torch.testing.assert_close(student.grad, expected.detach(), rtol=1e-10, atol=1e-12)


def test_entropy_is_that_of_the_posterior():
    assert float(posterior_entropy(torch.zeros(3, 7))) == pytest.approx(math.log(7), rel=1e-6)
    assert float(posterior_entropy(torch.tensor([[1000.0, 0.0]]))) == pytest.approx(0)
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    assert float(posterior_entropy(p.log()[None])) == pytest.approx(-float((p * p.log()).sum()))
    assert float(posterior_entropy(p.log()[None], 0.5)) < float(posterior_entropy(p.log()[None]))
