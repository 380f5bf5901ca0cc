"""Contrast and distillation against the formulas written out, open_clip's loss, and themselves in chunks."""

import open_clip
import pytest
import torch
import torch.nn.functional as F

from support.runs.distributed import run_distributed
from vlightning.callbacks import gather, rank
from vlightning.lightning_modules.losses.contrast import (
    PairFeatures,
    contrast_losses,
    pair_ids,
    same_pairs,
    share_of_repeats,
    text_ids,
)

PAIRS, WIDTH = 6, 8


def unit(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, width, generator=generator, dtype=torch.float64), dim=1)


def features(teachers=2):
    scale, widths, scales = torch.tensor(9.0, dtype=torch.float64), (5, 7, 4), (70.0, 60.0, 3.0)
    image, text = unit(PAIRS, WIDTH, 0), unit(PAIRS, WIDTH, 1)
    taught = [(unit(PAIRS, widths[k], 10 + k), unit(PAIRS, widths[k], 20 + k), scales[k]) for k in range(teachers)]
    return image, text, scale, taught


def whole(image, text, scale):
    return PairFeatures(image, text, image, text, scale)


def plain(image, text, scale, taught, weight):
    """The paper's sum, row by row."""
    contrast = distillation = 0.0
    for rows, columns, side in ((image, text, 0), (text, image, 1)):
        for i in range(PAIRS):
            student = (scale * columns @ rows[i]).softmax(0)
            contrast = contrast - student[i].log() / PAIRS / 2
            for pair in taught:
                teacher = (pair[2] * pair[1 - side] @ pair[side][i]).softmax(0)
                divergence = (teacher * (teacher.log() - student.log())).sum()
                distillation = distillation + divergence / PAIRS / 2 / len(taught)
    return (1 - weight) * contrast + weight * distillation


def weighted(terms, weight):
    return (1 - weight) * terms.contrast + weight * terms.distillation


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("teachers", [1, 2, 3])
def test_the_loss_equals_the_papers_sum_in_value_and_gradient(teachers, weight, chunk):
    image, text, scale, taught = features(teachers=teachers)
    expected_inputs, found_inputs = leaves(image, text, scale), leaves(image, text, scale)
    expected = plain(*expected_inputs, taught, weight)
    terms = contrast_losses(whole(*found_inputs), [whole(*teacher) for teacher in taught], chunk=chunk)
    found = weighted(terms, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    gradients = [
        torch.autograd.grad(value, inputs) for value, inputs in ((expected, expected_inputs), (found, found_inputs))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_the_contrast_equals_open_clips_loss():
    image, text, scale, _ = features()
    terms = contrast_losses(whole(image, text, scale), [])
    torch.testing.assert_close(terms.contrast, open_clip.ClipLoss()(image, text, scale))
    assert float(terms.distillation) == float(terms.entropy) == 0


def test_distillation_from_itself_is_zero():
    image, text, _, _ = features()
    same = whole(image, text, 20.0)
    assert float(contrast_losses(same, [same, same]).distillation) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("chunk", [None, 4])
def test_entropy_is_the_mean_over_teachers_rows_and_directions(chunk):
    image, text, scale, taught = features()
    terms = contrast_losses(whole(image, text, scale), [whole(*teacher) for teacher in taught], chunk=chunk)
    expected = 0.0
    for one, other, theirs in taught:
        logits = theirs * one @ other.T
        for row in (*logits, *logits.T):
            expected = expected - (row.softmax(0) * row.log_softmax(0)).sum() / PAIRS / 2 / len(taught)
    torch.testing.assert_close(terms.entropy, expected, rtol=1e-12, atol=0)


def test_half_precision_is_raised_before_the_softmax():
    image, text, _, taught = features()
    teachers = [whole(*teacher) for teacher in taught]
    expected = contrast_losses(whole(image.bfloat16().float(), text.bfloat16().float(), 100.0), teachers)
    with torch.autocast("cpu", torch.bfloat16):
        found = contrast_losses(whole(image.bfloat16(), text.bfloat16(), 100.0), teachers)
    torch.testing.assert_close(found, expected)
    assert found.contrast.dtype == torch.float32


def on_rank(chunk):
    image, text, scale, taught = features()
    own = slice(rank() * PAIRS // 2, (rank() + 1) * PAIRS // 2)
    inputs = leaves(image[own], text[own], scale)
    student = PairFeatures(
        inputs[0], inputs[1], gather(inputs[0], gradient=True), gather(inputs[1], gradient=True), inputs[2]
    )
    teachers = [PairFeatures(i[own], t[own], gather(i[own]), gather(t[own]), s) for i, t, s in taught]
    loss = weighted(contrast_losses(student, teachers, offset=rank() * PAIRS // 2, chunk=chunk), 0.7)
    loss.backward()
    return loss.detach(), [value.grad for value in inputs]


@pytest.mark.parametrize("chunk", [None, 2])
def test_two_processes_equal_one(chunk):
    image, text, scale, taught = features()
    inputs = leaves(image, text, scale)
    loss = weighted(contrast_losses(whole(*inputs), [whole(*teacher) for teacher in taught]), 0.7)
    loss.backward()
    halves = run_distributed(on_rank, chunk)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss.detach(), rtol=1e-12, atol=0)
    for place in range(2):  # gradients of the own rows; averaged over processes they are halved
        found = torch.cat([half[1][place] for half in halves]) / 2
        torch.testing.assert_close(found, inputs[place].grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(sum(half[1][2] for half in halves) / 2, inputs[2].grad, rtol=1e-10, atol=0)


def test_masking_pairs_of_an_image_is_refused_with_distillation():
    image, text, scale, taught = features()
    ids = torch.arange(PAIRS)
    with pytest.raises(ValueError, match="Expected no ids with teachers"):
        contrast_losses(whole(image, text, scale), [whole(*taught[0])], ids=(ids[:, None], ids[:, None]))


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_other_pairs_of_a_rows_image_are_masked(chunk):
    image, text, scale, _ = features()
    ids = torch.tensor([4, 7, 4, 4, 9, 7])
    found = contrast_losses(whole(image, text, scale), [], chunk=chunk, ids=(ids[:, None], ids[:, None])).contrast
    expected = 0.0
    for rows, columns in ((image, text), (text, image)):
        for i in range(PAIRS):
            kept = [j for j in range(PAIRS) if j == i or ids[j] != ids[i]]
            scores = scale * columns[kept] @ rows[i]
            expected = expected - scores.softmax(0)[kept.index(i)].log() / PAIRS / 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_texts_have_the_same_id_if_their_tokens_are_the_same_whatever_the_padding():
    ids = torch.tensor([[5, 6, 9, 0], [5, 6, 9, 4], [6, 5, 9, 0], [5, 6, 9, 0], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]])
    found = text_ids(ids, mask)
    shorter = text_ids(ids[[0]][:, :3], mask[[0]][:, :3])
    assert found[0] == found[1] == found[3] == shorter[0]
    assert len(set(found.tolist())) == 3
    every = torch.cartesian_prod(*[torch.arange(1, 30)] * 3)  # no two of 24,389 texts share an id
    assert len(text_ids(every, torch.ones_like(every)).unique()) == len(every)


def test_pairs_of_the_same_text_share_an_id_beside_those_of_the_same_image():
    batch = {
        "input_ids": torch.tensor([[1, 2], [3, 4], [1, 2]]),
        "attention_mask": torch.ones(3, 2),
        "image_id": torch.tensor([7, 7, 8]),
    }
    both = pair_ids(batch, True, True)[0]
    assert torch.equal(same_pairs(both, both, 0), torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 0]]).bool())
    assert pair_ids(batch, True, False)[0].shape == (3, 1)
    assert pair_ids(batch, False, False) is None
    assert share_of_repeats(both[:, 0]) == pytest.approx(1 / 3)
