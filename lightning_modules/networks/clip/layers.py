"""Layers of a tower: which parameters lie below which, for locks and for layer-wise learning rates."""

import re
from typing import NamedTuple

from timm.models import group_parameters
from torch import nn

_BLOCK = re.compile(r"^transformer\.resblocks\.(\d+)\.|^layer(\d)\.")
_EMBEDDING = re.compile(
    r"^(conv\d|bn\d|class_embedding|positional_embedding|patch_embed|ln_pre|token_embedding|cls_emb)(\.|$)"
)


class Layers(NamedTuple):
    """Layers of a tower.

    Attributes:
        blocks: number n of blocks.
        of: layer of each parameter by name: 0 for embeddings, 1 to n for blocks, n + 1 for what follows.
    """

    blocks: int
    of: dict[str, int]


def layers_of(tower: nn.Module) -> Layers:
    """Return the layers of an image or text tower of open_clip.

    Blocks are those of a transformer, the four stages of a ResNet, or the groups of timm's `group_matcher`.

    Args:
        tower: `visual` or `text` of a model.
    """
    trunk = getattr(tower, "trunk", None)
    if isinstance(trunk, nn.Module):
        groups = group_parameters(trunk, trunk.group_matcher(coarse=False))  # type: ignore[operator]
        # timm counts the last norm to the last block, and a classifier, here the projection, as a group.
        projects = any(True for _ in trunk.get_classifier().parameters())  # type: ignore[operator]
        last = max(groups) + (not projects)
        found = {f"trunk.{name}": group for group, names in groups.items() for name in names}
        return Layers(last - 1, {name: found.get(name, last) for name, _ in tower.named_parameters()})
    blocks = {name: int(match[1] or int(match[2] or 0) - 1) + 1 for name, match in _matches(tower)}
    last = max(blocks.values(), default=0) + 1
    return Layers(
        last - 1,
        {name: blocks.get(name, 0 if _EMBEDDING.match(name) else last) for name, _ in tower.named_parameters()},
    )


def _matches(tower: nn.Module) -> list[tuple[str, re.Match[str]]]:
    found = ((name, _BLOCK.match(name)) for name, _ in tower.named_parameters())
    return [(name, match) for name, match in found if match is not None]
