"""Fingerprints of the two towers of a network, whatever the form in which it is loaded."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_TEXT_IN_CLIP = ("text_projection", "positional_embedding", "token_embedding.", "transformer.", "ln_final.")
"""Weights of the text tower in open_clip's class CLIP, which has them beside those of the image tower."""


def weights_digest(state: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names, shapes, types and values of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state, key=_name):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name}{list(whole.shape)}{whole.dtype}".encode())
        digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tower_digests(network: nn.Module, whole: str) -> dict[str, str]:
    """Return the fingerprint of the image and of the text tower of a network.

    Args:
        network: a pair of open_clip's towers, a method with one as `evaluated`, or another network.
        whole: fingerprint of a network without separate towers.

    Returns:
        `image` and `text`.
    """
    pair: Any = getattr(network, "evaluated", network)
    visual = getattr(pair, "visual", None)
    if not isinstance(visual, nn.Module) or not hasattr(pair, "encode_text"):
        return {"image": whole, "text": whole}
    text = getattr(pair, "text", None)
    if isinstance(text, nn.Module):
        return {"image": tower_digest(visual), "text": tower_digest(text)}
    state = [(name, tensor) for name, tensor in pair.state_dict().items() if name.startswith(_TEXT_IN_CLIP)]
    return {"image": tower_digest(visual), "text": weights_digest(state)}


def tower_digest(tower: nn.Module) -> str:
    """Return the fingerprint of a tower; adapters, which are zero in a locked tower, do not count."""
    state = tower.state_dict().items()
    # Names without adapters, as `networks/clip/lora.py` makes them.
    plain = ((name.replace(".base_layer.", ".").replace("attn.in_proj.", "attn.in_proj_"), one) for name, one in state)
    return weights_digest((name, tensor) for name, tensor in plain if ".lora_" not in name)


def _name(item: tuple[str, Tensor]) -> str:
    return item[0]
