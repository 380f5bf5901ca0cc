"""Conversions of a trained ALBEF to the networks of the tasks: doubled fusion layers, and an answer decoder."""

from collections.abc import Mapping

from torch import Tensor

from ..official import HALVES, LAYER


def double_fusion(state: Mapping[str, Tensor], depth: int, fusion_depth: int) -> dict[str, Tensor]:
    """Return a state whose fusion layers are doubled, as `PairFusionLayer` has them.

    A state with twice the fusion layers, the authors' layout of NLVR2, is renamed. In any other, both halves are copies
    of the layer. A state that is doubled already is returned as it is.

    Args:
        state: names of this package.
        depth: number of text layers.
        fusion_depth: number of doubled layers.
    """
    layers = [int(match[2]) for name in state if (match := LAYER.search(name))]
    numbered = max(layers, default=-1) + 1 == depth + 2 * fusion_depth
    doubled: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = LAYER.search(name)
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
            doubled[LAYER.sub(rf"\g<1>{layer}.{half_name}", name)] = tensor
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
        match = LAYER.search(name)
        if module == "text_encoder" and (match is None or int(match[2]) >= depth):
            if match is not None:
                parameter = parameter.replace(f"layer.{match[2]}.", f"layer.{int(match[2]) - depth}.", 1)
            decoder[f"{root}.text_decoder.{parameter}"] = tensor
    return dict(state) | decoder
