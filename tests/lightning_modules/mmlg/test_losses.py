"""The loss of extraction against the formula written out, row by row."""

import pytest
import torch
import torch.nn.functional as F

from vlightning.lightning_modules.losses.contrast import PairFeatures, contrast_losses
from vlightning.lightning_modules.mmlg.module import distillation_loss, extraction_loss

PAIRS = 5


def side(seed, width, scale, gradient=False):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(PAIRS, width, generator=generator, dtype=torch.float64) for _ in range(2)]
    image, text = (F.normalize(part, dim=1).requires_grad_(gradient) for part in parts)
    return PairFeatures(image, text, image, text, scale)


def plain(student, teacher, weight):
    contrast = distillation = 0.0
    for row, column, name in ((student.image, student.text, "image"), (student.text, student.image, "text")):
        theirs = (teacher.image, teacher.text) if name == "image" else (teacher.text, teacher.image)
        for i in range(PAIRS):
            found = (student.scale * column @ row[i]).softmax(0)
            target = (teacher.scale * theirs[1] @ theirs[0][i]).softmax(0)
            contrast = contrast - found[i].log() / PAIRS / 2
            distillation = distillation - (target * found.log()).sum() / PAIRS / 2
    return contrast + weight * distillation


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, 2.0])
def test_the_loss_equals_the_papers_sum_in_value_and_gradient(weight, chunk):
    student, teacher = side(0, 6, 8.0, gradient=True), side(1, 9, 30.0)
    expected = plain(student, teacher, weight)
    found = extraction_loss(contrast_losses(student, [teacher], chunk=chunk), weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    inputs = (student.image, student.text)
    for one, other in zip(*(torch.autograd.grad(loss, inputs) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_distillation_from_itself_equals_the_entropy():
    same = side(0, 6, 8.0)
    rows = torch.cat([8.0 * same.image @ same.text.T, 8.0 * same.text @ same.image.T]).softmax(1)
    entropy = -(rows * rows.log()).sum(1).mean()
    assert entropy > 0.5
    torch.testing.assert_close(distillation_loss(contrast_losses(same, [same])), entropy, rtol=1e-12, atol=0)


def test_the_gradient_equals_that_of_the_divergence():
    student, teacher = side(0, 6, 8.0, gradient=True), side(1, 9, 30.0)
    terms = contrast_losses(student, [teacher])
    found, expected = (
        torch.autograd.grad(loss, student.image, retain_graph=True)[0]
        for loss in (distillation_loss(terms), terms.distillation)
    )
    assert torch.equal(found, expected)
    assert distillation_loss(terms) > terms.distillation


def test_weight_zero_gives_the_contrast():
    student, teacher = side(0, 6, 8.0), side(1, 9, 30.0)
    loss = extraction_loss(contrast_losses(student, []), 0.0)
    assert torch.equal(loss, contrast_losses(student, [teacher]).contrast)
