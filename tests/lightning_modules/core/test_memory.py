import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vlightning.lightning_modules.core.memory import in_slices, recomputed, weights_in_place


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_slices_equal_the_whole_batch_in_values_and_gradients(size):
    torch.manual_seed(0)
    weight = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(7, 4, dtype=torch.float64, requires_grad=True), torch.randn(7, 5, dtype=torch.float64)

    def function(x, y):
        hidden = (x @ weight).tanh()
        return hidden * y, hidden.sum(1)

    results = []
    for rows in (None, size):
        first, second = in_slices(function, rows, x, y)
        loss = (first.pow(2).sum(1) * second).sum()
        results.append((first, second, *torch.autograd.grad(loss, (weight, x))))
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(sliced, whole, rtol=1e-12, atol=1e-12)


def test_only_one_slice_is_in_memory_in_the_backward_pass():
    held, most = [0], [0]

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())
            held[0] += len(x)
            most[0] = max(most[0], held[0])
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            held[0] -= len(saved)
            return gradient * 2

    x = torch.randn(12, 3, requires_grad=True)
    counted = []

    def function(rows):
        counted.append(torch.is_grad_enabled())
        return (Held.apply(rows),)

    (out,) = in_slices(function, 4, x)
    held[0] = most[0] = 0  # what the forward pass saved was dropped
    out.sum().backward()
    assert most[0] == 4
    assert len(counted) == 6
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_dropout_repeats_its_draws():
    x = torch.ones(8, 100, requires_grad=True)
    torch.manual_seed(0)
    out = recomputed(lambda rows: torch.nn.functional.dropout(rows, 0.5), x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out)


def test_nothing_is_recomputed_without_gradient():
    calls = []
    with torch.no_grad():
        (out,) = in_slices(lambda rows: (calls.append(len(rows)) or rows + 1,), 2, torch.zeros(5, 1))
    assert calls == [2, 2, 1]
    assert torch.equal(out, torch.ones(5, 1))


def test_networks_hold_the_tensors_of_a_file_in_place_of_copies(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))

    trained = build()
    for tensor in trained.state_dict().values():
        tensor.add_(1)
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    state = load_file(tmp_path / "weights.safetensors")
    state["1.weight"] = state["1.weight"].half()  # is cast, and so copied
    with weights_in_place():
        torch.manual_seed(1)
        network = build()
        network.load_state_dict(state)
    for name, parameter in network.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.data_ptr() == state[name].data_ptr()) == (name != "1.weight")
        assert parameter.dtype == torch.float32
    expected = trained.eval()(torch.tensor([1, 5]))
    torch.testing.assert_close(network.eval()(torch.tensor([1, 5])), expected, atol=1e-2, rtol=0)
    assert build()[0].weight.std() > 0.5  # initialized again outside of the context
