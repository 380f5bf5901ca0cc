"""Initialization of open_clip's and timm's towers from a learngene.

Names of a descendant's parameters, by the tensors that they are initialized from; `i` is a layer, and the names of
open_clip's text tower are below `text.` in a CustomTextCLIP, at the root in a CLIP:

    learngene                              open_clip                               timm's ViT
    layer's qkv                            transformer.resblocks.i.attn.in_proj_*  blocks.i.attn.qkv.*
    layer's proj                           transformer.resblocks.i.attn.out_proj.* blocks.i.attn.proj.*
    layer's fc1                            transformer.resblocks.i.mlp.c_fc.*      blocks.i.mlp.fc1.*
    layer's fc2                            transformer.resblocks.i.mlp.c_proj.*    blocks.i.mlp.fc2.*
    layer's norm1                          transformer.resblocks.i.ln_1.*          blocks.i.norm1.*
    layer's norm2                          transformer.resblocks.i.ln_2.*          blocks.i.norm2.*
    vision.class_embedding                 class_embedding                         cls_token
    vision.positional_embedding            positional_embedding                    pos_embed
    vision.conv1.weight                    conv1.weight                            patch_embed.proj.weight
    vision.ln_pre                          ln_pre.*                                norm_pre.*
    vision.ln_post                         ln_post.*                               norm.*
    vision.proj                            proj, if the tower has one              none: the head is left unchanged
    text.*                                 the same names                          -
    logit_scale                            logit_scale, where both towers are set  -

The tensors of a layer come from the rule of the learngene's method (see `layers.Rule`).

A tower of timm's is made with `pre_norm=True` and `global_pool="token"`. Norms keep their epsilon, which is 1e-5 in the
network that a learngene is extracted from; masks and pooling are left to the descendant too.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import open_clip
import torch
import torch.nn.functional as F
from open_clip.transformer import TextTransformer, VisionTransformer
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from ...common.errors import UserError
from .file import Learngene
from .layers import TOWERS, Components, Layer, Rule, Tower, rule_of

_OPEN_CLIP_LAYER = {
    "norm1.weight": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "qkv.weight": "attn.in_proj_weight",
    "qkv.bias": "attn.in_proj_bias",
    "proj.weight": "attn.out_proj.weight",
    "proj.bias": "attn.out_proj.bias",
    "norm2.weight": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
    "fc1.weight": "mlp.c_fc.weight",
    "fc1.bias": "mlp.c_fc.bias",
    "fc2.weight": "mlp.c_proj.weight",
    "fc2.bias": "mlp.c_proj.bias",
}
_TIMM_ENDS = {
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "conv1.weight": "patch_embed.proj.weight",
    "ln_pre.weight": "norm_pre.weight",
    "ln_pre.bias": "norm_pre.bias",
    "ln_post.weight": "norm.weight",
    "ln_post.bias": "norm.bias",
}
_TIMM_HEAD = "head."
_OF_TIMMS_OPTIONS = ("norm_pre.", "norm.", "fc_norm.", "patch_embed.proj.bias")
"""Beginnings of the names that a ViT of timm has or lacks by `pre_norm` and `global_pool`."""


class _Target(NamedTuple):
    """A tower of a network.

    Args:
        tower: which tower.
        network: the module that is the tower.
        blocks: its layers.
        timm: whether the tower is timm's.
        prefix: of the tower's names in the network's state dict.
    """

    tower: Tower
    network: Any
    blocks: Any
    timm: bool
    prefix: str = ""


def expand_learngene(
    learngene: Learngene, network: nn.Module, tower: Tower | None = None, components: Components = "both"
) -> str:
    """Initialize the towers of a network from a learngene, in place; all of them or none.

    Afterwards no two layers share memory. Towers may differ in depth; the rule of the learngene's method
    determines the possible depths.

    Args:
        learngene: what to expand.
        network: open_clip's CLIP, CustomTextCLIP, VisionTransformer or TextTransformer, or timm's VisionTransformer, of
            the learngene's sizes.
        tower: the only tower of a CLIP to initialize; None initializes every tower that the network has.
        components: "unimodal" and "multimodal" leave the other term of each sum out, for ablations.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If the network is of another class, has no such tower, or its towers do not fit the learngene.
    """
    targets = _targets_of(network, tower)
    if not targets:
        raise UserError(f"Expected a network with a {tower} tower, got a {type(network).__name__}: change tower.")
    rule = rule_of(learngene.method)
    state = network.state_dict()
    made: dict[str, Tensor] = {}
    for target in targets:
        tensors = dict(_tower_tensors(learngene, rule, target, components))
        _check(target, tensors, learngene, rule, state)
        made |= tensors
    if len(targets) == len(TOWERS) and "logit_scale" in learngene.tensors:
        made["logit_scale"] = learngene.tensors["logit_scale"].reshape(state["logit_scale"].shape)
    with torch.no_grad():
        for name, tensor in made.items():
            state[name].copy_(tensor)
    towers = " and ".join(f"{len(target.blocks)} {target.tower} layers" for target in targets)
    left_out = "" if components == "both" else f", {components} blocks only"
    return f"{towers} start from the learngene of {learngene.method}{left_out}."


def _targets_of(network: nn.Module, tower: Tower | None) -> list[_Target]:
    if isinstance(network, open_clip.CustomTextCLIP | open_clip.CLIP):
        targets = []
        if tower != "text":
            targets += [target._replace(prefix="visual.") for target in _targets_of(network.visual, "vision")]
        if tower != "vision" and isinstance(network, open_clip.CLIP):
            targets.append(_Target("text", network, network.transformer.resblocks, False))
        elif tower != "vision":
            targets += [target._replace(prefix="text.") for target in _targets_of(network.text, "text")]
        return targets
    if isinstance(network, TimmVisionTransformer):
        target = _Target("vision", network, network.blocks, True)
    elif isinstance(network, VisionTransformer | TextTransformer):
        kind: Tower = "text" if isinstance(network, TextTransformer) else "vision"
        target = _Target(kind, network, network.transformer.resblocks, False)
    else:
        raise UserError(
            "Expected open_clip's CLIP, CustomTextCLIP, VisionTransformer or TextTransformer, or timm's "
            f"VisionTransformer, got a {type(network).__name__}: name such a network."
        )
    return [target] if tower in (None, target.tower) else []


def _tower_tensors(
    learngene: Learngene, rule: Rule, target: _Target, components: Components
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a tower by their names in the network."""
    tower = target.tower
    tensors = learngene.tensors
    ends = f"{tower}."
    for name, tensor in tensors.items():
        if name.startswith(ends):
            end = name.removeprefix(ends)
            if target.timm and end in _TIMM_ENDS:
                yield target.prefix + _TIMM_ENDS[end], _timm_shaped(end, tensor)
            elif not target.timm and not (end == "proj" and target.network.proj is None):
                yield target.prefix + end, tensor
    for layer, weights in enumerate(rule.layers(tensors, tower, len(target.blocks), learngene.sizes, components)):
        for name, tensor in weights.items():
            if target.timm:
                yield f"{target.prefix}blocks.{layer}.{_timm_name(name)}", tensor
            else:
                yield f"{target.prefix}transformer.resblocks.{layer}.{_OPEN_CLIP_LAYER[name]}", tensor


def open_clip_layer(state: dict[str, Tensor], tower: Tower, layer: int) -> Layer:
    """Return a layer of open_clip's CLIP by the names of a learngene, the inverse of expansion.

    Args:
        state: state dict of the CLIP.
        tower: which tower.
        layer: number of the layer, from 0.
    """
    prefix = f"{'visual.' if tower == 'vision' else ''}transformer.resblocks.{layer}."
    return {name: state[prefix + published] for name, published in _OPEN_CLIP_LAYER.items()}


def _timm_name(name: str) -> str:
    if name.startswith("norm"):
        return name
    return ("mlp." if name.startswith("fc") else "attn.") + name


def _timm_shaped(name: str, tensor: Tensor) -> Tensor:
    """Add the batch dimension that timm's embeddings have."""
    if name == "class_embedding":
        return tensor[None, None]
    return tensor[None] if name == "positional_embedding" else tensor


def _check(target: _Target, tensors: Layer, learngene: Learngene, rule: Rule, state: dict[str, Tensor]) -> None:
    """Compare a tower with the learngene: names and shapes of parameters, attention heads, activation function."""
    sizes = learngene.sizes
    kind = f"the {target.tower} tower of the {type(target.network).__name__}"
    expected = tensors.keys() & state
    if rule.sets_whole_tower:
        expected = {name for name in state if _belongs(target, name)}
    differing = [
        f"{name} of shape {list(state[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in state and state[name].shape != tensor.shape
    ]
    differing += [f"no {name}" for name in sorted(tensors.keys() - expected)]
    differing += [f"{name}, which the learngene does not have," for name in sorted(expected - tensors.keys())]
    heads = {block.attn.num_heads for block in target.blocks}
    if heads != {sizes.heads}:
        differing.append(f"{', '.join(map(str, sorted(heads)))} heads")
    if not all(_is_gelu(block.mlp.act if target.timm else block.mlp.gelu) for block in target.blocks):
        differing.append("another activation function than GELU")
    only_options = target.timm and all(each.removeprefix("no ").startswith(_OF_TIMMS_OPTIONS) for each in differing)
    remedy = 'with pre_norm=True and global_pool="token"' if only_options else "with these sizes"
    if differing:
        raise UserError(
            f"Expected {kind} to be {sizes.width} wide, with {sizes.heads} heads, GELU, images of {sizes.image_size} "
            f"pixels in patches of {sizes.patch_size}, {sizes.max_tokens} tokens and embedding dimension "
            f"{sizes.embed_dim}, as the learngene, got {differing[0]}: build the network {remedy}."
        )


def _belongs(target: _Target, name: str) -> bool:
    """Return whether a name of the network's state dict is a parameter of the tower."""
    if target.timm:
        return not name.startswith(_TIMM_HEAD)
    if isinstance(target.network, open_clip.CLIP):  # the names of its text tower have no prefix
        return not name.startswith("visual.") and name not in ("logit_scale", "logit_bias")
    return name.startswith(target.prefix)


def _is_gelu(activation: nn.Module) -> bool:
    """Compare with GELU: QuickGELU differs by 0.02, the approximation by tanh by 0.0005."""
    probe = torch.linspace(-3, 3, 25)
    return torch.allclose(activation(probe), F.gelu(probe), rtol=0, atol=2e-3)
