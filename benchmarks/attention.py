"""Attention, forward and backward: torch's fused kernel against two plain matrix products; and torch's module.

    python benchmarks/attention.py

The choices in `vlightning.lightning_modules.networks.attention` are based on this measurement. Times are medians of
interleaved calls. The second table compares `SelfAttention` with the torch module that it replaces, at the sizes of a
ViT-B/16.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import autocast, medians
from torch import Tensor, nn

from vlightning.lightning_modules.networks.attention import SelfAttention

# (batch, heads, tokens, head width): a small ViT at 96 px, a caption batch, ViT-S at 224 px.
SHAPES = ((128, 3, 37, 64), (256, 4, 16, 32), (16, 6, 197, 64))
REPEATS = 15


def _explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _milliseconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], gradient: Tensor) -> float:
    start = time.perf_counter()
    attend(*inputs).backward(gradient)
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Print a table."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; milliseconds, median of {REPEATS}")
    print(f"{'shape [B, H, N, D]':24} {'type':10} {'fused':>8} {'explicit':>9} {'ratio':>6}")
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
            gradient = torch.randn(shape, dtype=dtype)
            fused, explicit = [], []
            for _ in range(REPEATS + 2):
                fused.append(_milliseconds(F.scaled_dot_product_attention, inputs, gradient))
                explicit.append(_milliseconds(_explicit, inputs, gradient))
            slow, fast = statistics.median(fused[2:]), statistics.median(explicit[2:])
            name = str(dtype).removeprefix("torch.")
            print(f"{shape!s:24} {name:10} {slow:8.1f} {fast:9.1f} {slow / fast:6.1f}")
    modules()


def modules() -> None:
    """Print the comparison with torch's module."""
    print(f"{'self-attention, [8, 197, 768]':34} {'torch':>8} {'own':>9} {'ratio':>6}")
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        for trains in (False, True):
            found = medians(
                {
                    kind.__name__: module_step(kind, precision, trains)
                    for kind in (nn.MultiheadAttention, SelfAttention)
                },
                REPEATS,
            )
            slow, fast = (1000 * taken for taken in found.values())
            name = f"{precision}, {'trained' if trains else 'frozen'}"
            print(f"{name:34} {slow:8.1f} {fast:9.1f} {slow / fast:6.1f}")


def module_step(kind: type[nn.MultiheadAttention], precision: str, trains: bool) -> Callable[[], None]:
    """Return forward and, if it trains, backward pass of self-attention at the sizes of a ViT-B/16."""
    module, tokens = kind(768, 12, batch_first=True).train(trains).requires_grad_(trains), torch.randn(8, 197, 768)
    if precision != "32-true":
        tokens = tokens.bfloat16()  # the type of the previous layer's output
    if precision == "bf16-true":
        module = module.bfloat16()

    def run() -> None:
        with torch.set_grad_enabled(trains), autocast(precision):
            found = module(tokens, tokens, tokens, need_weights=False)[0]
        if trains:
            found.sum().backward()

    return run


if __name__ == "__main__":
    main()
