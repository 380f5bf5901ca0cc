"""The authors' layout of the tasks' checkpoints: no level `bert.` in the encoder, and numbered doubled layers.

Of NLVR2's 18 layers, 2(l - 6) + 6 and 2(l - 6) + 7 are the two halves of our layer l.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ....callbacks import AtomicCheckpointIO
from ..official import official_name

_LAYER = re.compile(r"(text_encoder\.bert\.encoder\.layer\.)(\d+)\.(first\.|second\.)?")
HALVES = ("first.", "second.")


def to_official(module: Any) -> dict[str, Tensor]:
    """Return the state of a task's module, with attributes `student` and `text`, under the authors' names."""
    state = module.state_dict()
    official = {task_name(own, module.text.depth): tensor for own, tensor in state.items()}
    if "temp" in official:
        official["temp"] = official["temp"].squeeze(0)
    for root in ("student", "teacher"):
        network: nn.Module | None = getattr(module, root, None)
        for part in ("text_encoder", "text_decoder"):
            encoder: Any = getattr(network, part, None)
            if encoder is not None:
                own = f"{root}.{part}.bert.embeddings.position_ids"
                official[official_name(own, flat=True)] = encoder.bert.embeddings.position_ids
    return official


def save_official(module: Any, path: str | Path) -> None:
    """Write `to_official` to a file that the authors' scripts load with `--checkpoint`.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    AtomicCheckpointIO().save_checkpoint({"model": to_official(module)}, path)


def task_name(own: str, depth: int) -> str:
    """Return the authors' name of a tensor.

    Args:
        own: name in this package.
        depth: number of text layers, which are not doubled.
    """

    def number(found: re.Match[str]) -> str:
        layer = int(found[2])
        if found[3]:
            layer = depth + 2 * (layer - depth) + HALVES.index(found[3])
        return f"{found[1]}{layer}."

    return official_name(_LAYER.sub(number, own), flat=True)


def double_fusion(state: Mapping[str, Tensor], depth: int, fusion_depth: int) -> dict[str, Tensor]:
    """Return a state whose fusion layers are doubled, as `PairFusionLayer` has them.

    A state with twice the fusion layers, the authors' layout of NLVR2, is renamed. In any other, both halves are copies
    of the layer. A state that is doubled already is returned as it is.

    Args:
        state: names of this package.
        depth: number of text layers.
        fusion_depth: number of doubled layers.
    """
    numbers = [int(found[2]) for name in state if (found := _LAYER.search(name))]
    numbered = max(numbers, default=-1) + 1 == depth + 2 * fusion_depth
    doubled: dict[str, Tensor] = {}
    for name, tensor in state.items():
        found = _LAYER.search(name)
        if found is None or found[3] or int(found[2]) < depth:
            doubled[name] = tensor
            continue
        layer = int(found[2])
        halves: tuple[str, ...] = HALVES
        if numbered:
            layer, half = depth + (layer - depth) // 2, (layer - depth) % 2
            halves = (HALVES[half],)
        for half_name in halves:
            doubled[_LAYER.sub(rf"\g<1>{layer}.{half_name}", name)] = tensor
    return doubled


def with_decoder(state: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Return a state with the answer decoder of VQA: copies of the fusion layers, the embeddings and the head.

    A state with a decoder is returned as it is.

    Args:
        state: names of this package.
        depth: number of text layers.
    """
    if any(".text_decoder." in name for name in state):
        return dict(state)
    decoder: dict[str, Tensor] = {}
    for name, tensor in state.items():
        root, part, inner = [*name.split(".", 2), "", ""][:3]
        found = _LAYER.search(name)
        if part == "text_encoder" and (found is None or int(found[2]) >= depth):
            if found is not None:
                inner = inner.replace(f"layer.{found[2]}.", f"layer.{int(found[2]) - depth}.", 1)
            decoder[f"{root}.text_decoder.{inner}"] = tensor
    return dict(state) | decoder
