"""Features of locked towers that a training reads from a store in place of running the tower."""

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from ...common.errors import UserError
from ..core.towers import has_stored_features, tower_digest, trained_head
from ..core.trainers import datamodule_of


def towers_of(network: Any) -> dict[str, Any]:
    """Return the towers of a pair by the names `image` and `text`."""
    return {"image": network.visual, "text": network.text}


def locked_towers(network: Any) -> list[str]:
    """Return the towers of a pair whose features stay the same, perhaps those before a projection that trains."""
    return [side for side, tower in towers_of(network).items() if has_stored_features(tower)]


def check_stored(module: Any, network: Any) -> None:
    """Check that the features that the data reads from a store are those of the module's locked towers.

    Args:
        module: the module, whose weights are loaded.
        network: its pair of towers.

    Raises:
        UserError: If a tower has other weights, or a projection that runs alone is sharded.
    """
    stored: Mapping[str, Any] | None = getattr(datamodule_of(module), "stored", None)
    if stored is None:
        return
    towers = towers_of(network)
    for side, record in stored["towers"].items():
        head = trained_head(towers[side])
        # FSDP2 gathers the weights of a projection when its tower runs, which it does not.
        if head is not None and any(isinstance(weight, DTensor) for weight in head[1].parameters()):
            raise UserError(
                f"Expected a strategy that does not shard, such as ddp, with features before the projection of the "
                f"{side} tower, got {type(module.trainer.strategy).__name__}: set trainer.strategy, or leave out "
                "data.store."
            )
        if tower_digest(towers[side]) != record:
            raise UserError(
                f"Expected a store of this {side} tower as data.store, got features by other weights or behind another "
                f"layer, of {stored['model']!r}: embed the data with the model of the training (`vlightning embed "
                "--config`), or leave out data.store."
            )
