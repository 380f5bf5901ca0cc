"""A learngene expanded into the towers of other libraries.

What a descendant's parameters are called, by what they start from; `i` is a layer, and open_clip's text tower is below
`text.` in a CustomTextCLIP, at the root in a CLIP:

    learngene                              open_clip                               timm's ViT
    sum of blocks, qkv                     transformer.resblocks.i.attn.in_proj_*  blocks.i.attn.qkv.*
    sum of blocks, proj                    transformer.resblocks.i.attn.out_proj.* blocks.i.attn.proj.*
    sum of blocks, fc1                     transformer.resblocks.i.mlp.c_fc.*      blocks.i.mlp.fc1.*
    sum of blocks, fc2                     transformer.resblocks.i.mlp.c_proj.*    blocks.i.mlp.fc2.*
    norms.<tower>.norm1                    transformer.resblocks.i.ln_1.*          blocks.i.norm1.*
    norms.<tower>.norm2                    transformer.resblocks.i.ln_2.*          blocks.i.norm2.*
    vision.class_embedding                 class_embedding                         cls_token
    vision.positional_embedding            positional_embedding                    pos_embed
    vision.conv1.weight                    conv1.weight                            patch_embed.proj.weight
    vision.ln_pre                          ln_pre.*                                norm_pre.*
    vision.ln_post                         ln_post.*                               norm.*
    vision.proj                            proj, if it has one                     none: its head stays as it is
    text.*                                 the same names                          -
    logit_scale                            logit_scale, where both towers are set  -

The first six lines are those of a layer, whichever method's learngene it is from; that of He-LG has no other, and of
its descendants only the last layers are set.

A tower of timm's is made with `pre_norm=True` and `global_pool="token"`. Norms keep the epsilon that they have, which
is 1e-5 in the auxiliary; masks and pooling are the network's own matter too.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import open_clip
import torch
import torch.nn.functional as F
from open_clip.transformer import TextTransformer, VisionTransformer
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from .file import Learngene
from .layers import TOWERS, Components, Layer, Tower, descendant_layers

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
_HEAD = "head."  # timm's; a descendant's is new


class _Part(NamedTuple):
    """A tower in a network."""

    tower: Tower
    network: Any
    blocks: Any
    timm: bool
    prefix: str = ""  # of its names in the network's state dict


def expand_learngene(
    learngene: Learngene, network: nn.Module, tower: Tower | None = None, components: Components = "both"
) -> str:
    """Gives a network's towers the weights that a learngene has for them, in place; all of them or none.

    Afterwards no two layers share anything. How many layers there are is the network's matter: each tower may have any
    depth from half the auxiliary's to all of it.

    Args:
        learngene: What to expand.
        network: open_clip's CLIP, CustomTextCLIP, VisionTransformer or TextTransformer, or timm's VisionTransformer, of
            the learngene's sizes.
        tower: Which of a CLIP's to set, the other one stays as it is; None sets what the network has.
        components: "unimodal" and "multimodal" leave the other term of each sum out, for ablations.

    Returns:
        What was done, a sentence for the log.

    Raises:
        TypeError: If the network is something else.
        ValueError: If it has no such tower, another depth, width or function, or parameters that the learngene has not.
    """
    parts = _parts(network, tower)
    if not parts:
        raise ValueError(f"Found no {tower} tower in the {type(network).__name__}: name another one as tower.")
    state = network.state_dict()
    made: dict[str, Tensor] = {}
    for part in parts:
        made |= _checked(part, _tower(learngene, part, components), learngene, state)
    if len(parts) == len(TOWERS) and "logit_scale" in learngene.tensors:
        made["logit_scale"] = learngene.tensors["logit_scale"].reshape(state["logit_scale"].shape)
    with torch.no_grad():
        for name, tensor in made.items():
            state[name].copy_(tensor)
    towers = " and ".join(f"{len(part.blocks)} {part.tower} layers" for part in parts)
    left_out = "" if components == "both" else f", {components} blocks only"
    return f"{towers} start from the learngene of {learngene.method}{left_out}."


def _parts(network: nn.Module, tower: Tower | None) -> list[_Part]:
    if isinstance(network, open_clip.CustomTextCLIP | open_clip.CLIP):
        found = []
        if tower != "text":
            found += [part._replace(prefix="visual.") for part in _parts(network.visual, "vision")]
        if tower != "vision" and isinstance(network, open_clip.CLIP):
            found.append(_Part("text", network, network.transformer.resblocks, False))
        elif tower != "vision":
            found += [part._replace(prefix="text.") for part in _parts(network.text, "text")]
        return found
    if isinstance(network, TimmVisionTransformer):
        part = _Part("vision", network, network.blocks, True)
    elif isinstance(network, VisionTransformer | TextTransformer):
        kind: Tower = "text" if isinstance(network, TextTransformer) else "vision"
        part = _Part(kind, network, network.transformer.resblocks, False)
    else:
        raise TypeError(
            f"Found a {type(network).__name__}, expected open_clip's CLIP, CustomTextCLIP, VisionTransformer or "
            "TextTransformer, or timm's VisionTransformer: name such a network."
        )
    return [part] if tower in (None, part.tower) else []


def _tower(learngene: Learngene, part: _Part, components: Components) -> Iterator[tuple[str, Tensor]]:
    """The tower's parameters by the names that they have in the network."""
    tower, tensors = part.tower, learngene.tensors
    ends = f"{tower}."
    for name, tensor in tensors.items():
        if name.startswith(ends):
            own = name.removeprefix(ends)
            if part.timm and own in _TIMM_ENDS:
                yield part.prefix + _TIMM_ENDS[own], _shaped(own, tensor)
            elif not part.timm and not (own == "proj" and part.network.proj is None):
                yield part.prefix + own, tensor
    depth = len(part.blocks)
    layers = descendant_layers(learngene.method, tensors, tower, depth, learngene.sizes.layers // 2, components)
    for layer, weights in enumerate(layers):
        for name, tensor in weights.items():
            if part.timm:
                inner = name if name.startswith("norm") else _timm_linear(name)
                yield f"{part.prefix}blocks.{layer}.{inner}", tensor
            else:
                yield f"{part.prefix}transformer.resblocks.{layer}.{_OPEN_CLIP_LAYER[name]}", tensor


def open_clip_layer(state: dict[str, Tensor], tower: Tower, layer: int) -> Layer:
    """A layer of open_clip's CLIP by the names that it has in a learngene; the other way round than expansion.

    Args:
        state: The CLIP's state dict.
        tower: Which.
        layer: From 0.
    """
    prefix = f"{'visual.' if tower == 'vision' else ''}transformer.resblocks.{layer}."
    return {name: state[prefix + theirs] for name, theirs in _OPEN_CLIP_LAYER.items()}


def _timm_linear(name: str) -> str:
    return ("mlp." if name.startswith("fc") else "attn.") + name


def _shaped(name: str, tensor: Tensor) -> Tensor:
    """With the dimension for a batch that tokens have in timm."""
    if name == "class_embedding":
        return tensor[None, None]
    return tensor[None] if name == "positional_embedding" else tensor


def _checked(
    part: _Part, weights: Iterator[tuple[str, Tensor]], learngene: Learngene, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tower's parameters, after comparing them and what is no parameter with the network's."""
    sizes, kind = learngene.sizes, f"the {part.tower} tower of the {type(part.network).__name__}"
    made = dict(weights)
    wanted = (
        f"{sizes.width} wide, with {sizes.heads} heads, GELU, images of {sizes.image_size} pixels in patches of "
        f"{sizes.patch_size}, {sizes.max_tokens} tokens and features of {sizes.embed_dim} values"
    )
    # He-LG sets some layers only.
    expected = {name for name in state if _belongs(part, name)} if learngene.method != "He-LG" else made.keys() & state
    differing = [
        f"{name} of shape {list(state[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in made.items()
        if name in state and state[name].shape != tensor.shape
    ]
    differing += [f"no {name}" for name in sorted(made.keys() - expected)]
    differing += [f"{name}, which the learngene has not," for name in sorted(expected - made.keys())]
    heads = {block.attn.num_heads for block in part.blocks}
    if heads != {sizes.heads}:
        differing.append(f"{', '.join(map(str, sorted(heads)))} heads")
    if not all(_is_gelu(block.mlp.act if part.timm else block.mlp.gelu) for block in part.blocks):
        differing.append("another activation function than GELU")
    if differing:
        raise ValueError(f"Found {differing[0]} in {kind}, expected one as the learngene's: {wanted}; build it so.")
    return made


def _belongs(part: _Part, name: str) -> bool:
    """Whether a name of the network's state dict is a parameter of the tower."""
    if part.timm:
        return not name.startswith(_HEAD)
    if isinstance(part.network, open_clip.CLIP):  # the text tower's names are not below one of their own
        return not name.startswith("visual.") and name not in ("logit_scale", "logit_bias")
    return name.startswith(part.prefix)


def _is_gelu(activation: nn.Module) -> bool:
    """QuickGELU is 0.02 away from it, its usual approximation by tanh 0.0005."""
    probe = torch.linspace(-3, 3, 25)
    return torch.allclose(activation(probe), F.gelu(probe), rtol=0, atol=2e-3)
