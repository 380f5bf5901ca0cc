"""An MLP that saves fewer activations computes the same, with each product once."""

from functools import partial

import pytest
import torch
from timm.layers import Mlp
from torch.utils.flop_counter import FlopCounterMode

from vlightning.lightning_modules.core.memory import LeanMlp

WIDTH, HIDDEN, TOKENS = 8, 32, 5


def both() -> tuple[LeanMlp, Mlp]:
    torch.manual_seed(0)
    lean = LeanMlp(WIDTH, HIDDEN).double()
    plain = Mlp(WIDTH, HIDDEN).double()
    plain.load_state_dict(lean.state_dict())
    return lean, plain


def kept_elements(module: torch.nn.Module) -> int:
    """Elements that a forward pass keeps for the backward pass, parameters aside."""
    parameters = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(torch.randn(TOKENS, WIDTH, dtype=torch.float64))
    return sum(tensor.numel() for tensor in kept.values())


def test_output_and_gradients_equal_timm():
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    results = []
    for module in both():
        tokens.grad = None
        output = module(tokens)
        output.square().sum().backward()
        results.append([output, tokens.grad.clone(), *(parameter.grad for parameter in module.parameters())])
    for lean, plain in zip(*results, strict=True):
        torch.testing.assert_close(lean, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_output_and_gradients_equal_timm_under_autocast(frozen):
    tokens = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    results = []
    for module in both():
        module.float()
        module.fc2.requires_grad_(not frozen)
        tokens.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            output = module(tokens)
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        results.append([output, tokens.grad.clone(), *(parameter.grad for parameter in module.parameters())])
    for lean, plain in zip(*results, strict=True):
        assert (lean is None and plain is None) or torch.equal(lean, plain)


def test_dropout_and_other_activations_equal_timm():
    tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)
    tanh = partial(torch.nn.GELU, approximate="tanh")
    for options in ({"drop": 0.5}, {"act_layer": torch.nn.ReLU}, {"act_layer": tanh}):
        results = []
        for kind in (LeanMlp, Mlp):
            torch.manual_seed(0)
            module = kind(WIDTH, HIDDEN, **options)
            tokens.grad = None
            module(tokens).square().sum().backward()
            results.append([tokens.grad.clone(), *(parameter.grad for parameter in module.parameters())])
        for lean, plain in zip(*results, strict=True):
            torch.testing.assert_close(lean, plain)


def test_hidden_states_are_saved_once():
    lean, plain = both()
    assert kept_elements(plain) == TOKENS * (WIDTH + 2 * HIDDEN)
    # The hidden states themselves are held by the recomputation, outside of what autograd keeps.
    assert kept_elements(lean) <= TOKENS * (WIDTH + HIDDEN)


@pytest.mark.parametrize("number", [0, 1], ids=["lean", "timm's"])
def test_products_are_not_recomputed(number):
    module = both()[number]
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * TOKENS * WIDTH * HIDDEN)
