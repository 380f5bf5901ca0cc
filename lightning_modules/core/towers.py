"""Two towers of a network: their fingerprints in any form in which it is loaded, and the features of locked ones."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...common.errors import UserError
from .trainers import datamodule_of

SPACE = "space"
"""Entry of checkpoints, exports and manifests of stores with a `Space`."""
_TEXT_IN_CLIP = ("text_projection", "positional_embedding", "token_embedding.", "transformer.", "ln_final.")
"""Weights of the text tower in open_clip's class CLIP, which has them beside those of the image tower."""


@dataclass(frozen=True)
class Space:
    """The joint space of a trained pair of towers, known by the fingerprints of both.

    Features of different spaces cannot be compared: their cosines mean nothing. A tower that was trained into the space
    of another pair has that pair's space.

    Args:
        name: name of the pair, for messages.
        image: fingerprint of its image tower, `tower_digest_of`.
        text: fingerprint of its text tower.
    """

    name: str
    image: str
    text: str

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Space | None:
        """Return the space that a checkpoint, an export or the manifest of a store names; None for one of its own."""
        record = content.get(SPACE)
        return None if record is None else cls(**record)

    def as_dict(self) -> dict[str, str]:
        """Return the fields as plain data."""
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """The first twelve digits of the SHA-256 of both fingerprints."""
        return hashlib.sha256(f"{self.image}{self.text}".encode()).hexdigest()[:12]

    def is_that_of(self, other: Space) -> bool:
        """Return whether both are the same space."""
        return (self.image, self.text) == (other.image, other.text)

    def described(self) -> str:
        """Return a sentence for a model card."""
        return (
            f"The embeddings belong to the space {self.fingerprint}, that of `{Path(self.name).name}` (SHA-256 of its "
            f"image tower {self.image}, of its text tower {self.text}): compare them with embeddings of this space "
            "only."
        )


def weights_digest(state: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names, shapes, types and values of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state, key=_name):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name}{list(whole.shape)}{whole.dtype}".encode())
        digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tower_digest_of(network: nn.Module, side: str) -> str | None:
    """Return the fingerprint of the image or of the text tower of a network; None if it has no separate towers.

    Args:
        network: a pair of open_clip's towers, a method with one as `evaluated`, or another network.
        side: `image` or `text`.
    """
    pair: Any = getattr(network, "evaluated", network)
    visual = getattr(pair, "visual", None)
    if not isinstance(visual, nn.Module) or not hasattr(pair, "encode_text"):
        return None
    tower = visual if side == "image" else getattr(pair, "text", None)
    if isinstance(tower, nn.Module):
        return tower_digest(tower)
    return weights_digest(
        (name, tensor) for name, tensor in pair.state_dict().items() if name.startswith(_TEXT_IN_CLIP)
    )


def tower_digest(tower: nn.Module, whole: bool = False) -> str:
    """Return the fingerprint of what a tower has before its projection, if that trains, else of the whole tower.

    Adapters that are zero, as those of a locked tower, do not count.

    Args:
        tower: the tower.
        whole: whether a projection that trains counts too.
    """
    head = None if whole else trained_head(tower)
    left_out = "" if head is None else f"{head[0]}."
    counts = any(bool(tensor.any()) for name, tensor in tower.state_dict().items() if ".lora_B" in name)
    # Names without adapters, as `networks/clip/lora.py` makes them.
    plain = (
        (name.replace(".base_layer.", ".").replace("attn.in_proj.", "attn.in_proj_"), tensor)
        for name, tensor in tower.state_dict().items()
        if not (left_out and name.startswith(left_out))
    )
    return weights_digest((name, tensor) for name, tensor in plain if counts or ".lora_" not in name)


# Locked towers, of which a projection may train


def trained_head(tower: Any) -> tuple[str, nn.Module] | None:
    """Return name and module of the projection at the end of a tower, if it trains and the rest of the tower does not.

    Towers of open_clip with a network of timm have it as `head`, those with an encoder of transformers as `proj`.
    """
    for encoder, name in (("trunk", "head"), ("transformer", "proj")):
        head = getattr(tower, name, None)
        if isinstance(getattr(tower, encoder, None), nn.Module) and isinstance(head, nn.Module) and _trains(head):
            return (name, head) if is_locked(tower, name) else None
    return None


def is_locked(tower: nn.Module, without: str = "") -> bool:
    """Return whether no weight of a tower trains, perhaps without those of its projection."""
    return not any(
        parameter.requires_grad
        for name, parameter in tower.named_parameters()
        if not (without and name.startswith(f"{without}."))
    )


def has_stored_features(tower: nn.Module) -> bool:
    """Return whether features of a tower stay the same in a training: its own, or those before its projection."""
    return is_locked(tower) or trained_head(tower) is not None


def locked_features(tower: nn.Module, encode: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the features of a locked tower that a store holds: those before its projection, if that trains.

    Args:
        tower: the tower.
        encode: runs it.
        inputs: images or token ids.
    """
    head = trained_head(tower)
    if head is None:
        return encode(inputs)
    taken: list[Tensor] = []

    def take(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        taken.append(arguments[0])

    handle = head[1].register_forward_pre_hook(take)
    try:
        encode(inputs)
    finally:
        handle.remove()
    return taken[0]


def projected(tower: nn.Module, features: Tensor) -> Tensor:
    """Return the embeddings [B, E] of features by `locked_features`."""
    head = trained_head(tower)
    if head is None:
        return features
    embeddings: Tensor = head[1](features)
    return embeddings


def towers_of(network: Any) -> dict[str, Any]:
    """Return the towers of a pair by the names `image` and `text`."""
    return {"image": network.visual, "text": network.text}


def locked_towers(network: Any) -> list[str]:
    """Return the towers of a pair whose features stay the same, perhaps those before a projection that trains."""
    return [side for side, tower in towers_of(network).items() if has_stored_features(tower)]


def check_stored(module: Any, network: Any) -> None:
    """Check that the features that the data reads from stores are those of the module's towers.

    Args:
        module: the module, whose weights are loaded.
        network: its pair of towers.

    Raises:
        UserError: If a tower has other weights, or a projection that runs alone is sharded.
    """
    stored: Mapping[str, Mapping[str, Any]] = getattr(datamodule_of(module), "stored", None) or {}
    expected = {
        (side, sha256): record["model"] for record in stored.values() for side, sha256 in record["towers"].items()
    }
    towers = towers_of(network) if expected else {}
    for (side, sha256), model in expected.items():
        head = trained_head(towers[side])
        # FSDP2 gathers the weights of a projection when its tower runs, which it does not.
        if head is not None and any(isinstance(weight, DTensor) for weight in head[1].parameters()):
            raise UserError(
                f"Expected a strategy that does not shard, such as ddp, with features before the projection of the "
                f"{side} tower, got {type(module.trainer.strategy).__name__}: set trainer.strategy, or leave out "
                "data.store."
            )
        if tower_digest(towers[side]) != sha256:
            raise UserError(
                f"Expected a store of this {side} tower as data.store, got features by other weights or behind another "
                f"layer, of {model!r}: embed the data with the model of the training (`vlightning embed "
                "--config`), or leave out data.store."
            )


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _name(item: tuple[str, Tensor]) -> str:
    return item[0]
