"""AdamW, fused."""

from typing import Any

from torch.optim import AdamW

from .layout import lay_out_moments


def adamw(
    groups: list[dict[str, Any]],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
) -> AdamW:
    """Return a fused AdamW whose moments have the memory format of their weights.

    Args:
        groups: parameter groups; `weight_decay` is the default of a group.
        learning_rate: learning rate at its peak.
        weight_decay: weight decay of groups without their own.
        betas: beta1 and beta2.
        eps: epsilon.
    """
    optimizer = AdamW(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    lay_out_moments(optimizer)
    return optimizer
