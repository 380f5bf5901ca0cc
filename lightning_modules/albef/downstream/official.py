"""The authors' layout of the tasks' checkpoints: no level `bert.` in the encoder, and numbered doubled layers.

Of NLVR2's 18 layers, 2(l - 6) + 6 and 2(l - 6) + 7 are the two halves of our layer l.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ....callbacks import AtomicCheckpointIO
from ..official import official_name

_LAYER = re.compile(r"(text_encoder\.bert\.encoder\.layer\.)(\d+)\.(first\.|second\.)?")
HALVES = ("first.", "second.")


def to_official(module: Any) -> dict[str, Tensor]:
    """Return the state of a task's module, with attributes `student` and `text`, under the authors' names."""
    state = module.state_dict()
    official = {task_name(name, module.text.depth): tensor for name, tensor in state.items()}
    if "temp" in official:
        official["temp"] = official["temp"].squeeze(0)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name.endswith("bert.embeddings.position_ids"):
            official[official_name(name, flat=True)] = buffer
    return official


def save_official(module: Any, path: str | Path) -> None:
    """Write `to_official` to a file that the authors' scripts load with `--checkpoint`.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    AtomicCheckpointIO().save_checkpoint({"model": to_official(module)}, path)


def task_name(name: str, depth: int) -> str:
    """Return the authors' name of a tensor.

    Args:
        name: name in this package.
        depth: number of text layers, which are not doubled.
    """

    def numbered(match: re.Match[str]) -> str:
        layer = int(match[2])
        if match[3]:
            layer = depth + 2 * (layer - depth) + HALVES.index(match[3])
        return f"{match[1]}{layer}."

    return official_name(_LAYER.sub(numbered, name), flat=True)


def double_fusion(state: Mapping[str, Tensor], depth: int, fusion_depth: int) -> dict[str, Tensor]:
    """Return a state whose fusion layers are doubled, as `PairFusionLayer` has them.

    A state with twice the fusion layers, the authors' layout of NLVR2, is renamed. In any other, both halves are copies
    of the layer. A state that is doubled already is returned as it is.

    Args:
        state: names of this package.
        depth: number of text layers.
        fusion_depth: number of doubled layers.
    """
    layers = [int(match[2]) for name in state if (match := _LAYER.search(name))]
    numbered = max(layers, default=-1) + 1 == depth + 2 * fusion_depth
    doubled: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _LAYER.search(name)
        if match is None or match[3] or int(match[2]) < depth:
            doubled[name] = tensor
            continue
        layer = int(match[2])
        halves: tuple[str, ...] = HALVES
        if numbered:
            half = (layer - depth) % 2
            layer = depth + (layer - depth) // 2
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
        root, module, parameter = [*name.split(".", 2), "", ""][:3]
        match = _LAYER.search(name)
        if module == "text_encoder" and (match is None or int(match[2]) >= depth):
            if match is not None:
                parameter = parameter.replace(f"layer.{match[2]}.", f"layer.{int(match[2]) - depth}.", 1)
            decoder[f"{root}.text_decoder.{parameter}"] = tensor
    return dict(state) | decoder
