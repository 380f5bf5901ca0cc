"""SigLIP's loss against open_clip's, in chunks, with masked pairs, and over two processes."""

import open_clip
import pytest
import torch
import torch.nn.functional as F

from support.runs.distributed import run_distributed
from vlightning.callbacks import gather, rank
from vlightning.lightning_modules.losses.contrast import PairFeatures
from vlightning.lightning_modules.losses.sigmoid import sigmoid_loss

PAIRS = 6


def inputs():
    generator = torch.Generator().manual_seed(3)
    image, text = (
        F.normalize(torch.randn(PAIRS, 5, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    )
    scalars = torch.tensor([9.0], dtype=torch.float64), torch.tensor([-4.0], dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in (image, text, *scalars)]


def whole(image, text, scale):
    return PairFeatures(image, text, image, text, scale)


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_the_loss_equals_open_clips_in_value_and_gradient(chunk):
    expected_inputs, found_inputs = inputs(), inputs()
    expected = open_clip.loss.SigLipLoss()(*expected_inputs)
    *features, bias = found_inputs
    found = sigmoid_loss(whole(*features), bias, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    expected.backward()
    found.backward()
    for ours, theirs in zip(found_inputs, expected_inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_pairs_that_share_an_id_are_left_out():
    image, text, scale, bias = inputs()
    ids = torch.tensor([[0, 5], [1, 6], [0, 7], [3, 6], [4, 9], [8, 10]])
    found = sigmoid_loss(whole(image, text, scale), bias, chunk=4, ids=(ids, ids))
    expected = 0.0
    for i in range(PAIRS):
        for j in range(PAIRS):
            if i == j or not (ids[i] == ids[j]).any():
                sign = 1 if i == j else -1
                expected = expected - F.logsigmoid(sign * (scale[0] * image[i] @ text[j] + bias[0])) / PAIRS
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def on_rank():
    image, text, scale, bias = inputs()
    own = slice(rank() * 3, rank() * 3 + 3)
    mine = [tensor.detach()[own].clone().requires_grad_() for tensor in (image, text)]
    everyone = gather(torch.cat(mine, 1), True).split([5, 5], 1)
    loss = sigmoid_loss(PairFeatures(*mine, *everyone, scale), bias, offset=rank() * 3, chunk=2)
    loss.backward()
    return loss.detach(), [tensor.grad for tensor in mine], scale.grad, bias.grad


def test_two_processes_give_the_loss_and_the_gradients_of_one():
    expected_inputs = inputs()
    image, text, scale, bias = expected_inputs
    loss = sigmoid_loss(whole(image, text, scale), bias)
    loss.backward()
    halves = run_distributed(on_rank)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss.detach(), rtol=1e-12, atol=0)
    for place, tensor in enumerate((image, text)):
        found = torch.cat([half[1][place] for half in halves]) / 2
        torch.testing.assert_close(found, tensor.grad, rtol=1e-10, atol=1e-13)
    for place, tensor in ((2, scale), (3, bias)):
        torch.testing.assert_close(sum(half[place] for half in halves) / 2, tensor.grad, rtol=1e-10, atol=1e-13)
