"""Nucleus sampling of tokens that depends on given random numbers only.

Shapes: V vocabulary.
"""

import torch
from torch import Tensor

_LIKELY = 1024
"""Tokens that nucleus sampling sorts first: sorting all 49,408 would take most of the time."""


def draw(logits: Tensor, uniform: Tensor, top_p: float, temperature: float) -> Tensor:
    """Draw tokens by inverting their cumulative distribution, which is robust to rounding of the logits.

    Args:
        logits: [..., V].
        uniform: float64 random numbers in [0, 1), [...].
        top_p: as in `Captioner`.
        temperature: as in `Captioner`.

    Returns:
        Token ids, long [...].
    """
    probabilities = (top_p_filtered(logits, top_p) / temperature).softmax(-1, dtype=torch.float64)
    distribution = probabilities.cumsum(-1)
    # In (0, sum], where the sum need not be 1, so that no token of probability 0 is drawn.
    target = (1 - uniform)[..., None] * distribution[..., -1:]
    return torch.searchsorted(distribution, target)[..., 0]


def top_p_filtered(logits: Tensor, top_p: float) -> Tensor:
    """Return logits [..., V] with -inf for all but the most likely tokens, of cumulative probability `top_p`."""
    if logits.shape[-1] > _LIKELY:
        largest, places = logits.topk(_LIKELY)
        probabilities = (largest.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
        likelier = probabilities.cumsum(-1) - probabilities
        if bool((likelier[..., -1] >= top_p).all()):  # no other token is kept
            kept = largest.masked_fill(likelier >= top_p, -torch.inf)
            return torch.full_like(logits, -torch.inf).scatter(-1, places, kept)
    ascending, order = logits.sort(dim=-1, stable=True)
    dropped = ascending.softmax(-1, dtype=torch.float64).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
