"""The vendor's names and shapes of MobileCLIP's weights.

Each name of this package has a vendor's name, except the bias in the projection of timm's image towers, which is zero.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn

from ....common.errors import UserError

_PROJECTION = "visual.trunk.head."
_FIFTH_STAGE = "visual.trunk.stages.4."
_IMAGE = (
    (r"^stem\.", "patch_embed."),
    (r"^final_conv\.", "conv_exp."),
    (r"\bconv_kxk\b", "rbr_conv"),
    (r"\bconv_scale\b", "rbr_scale"),
    (r"\bidentity\b", "rbr_skip"),
    (r"\blarge_conv\b", "lkb_origin"),
    (r"\bmlp\b", "convffn"),
    (r"(layer_scale\w*)\.gamma$", r"\1"),
    (r"^(conv_exp\.se)\.fc1\b", r"\1.reduce"),
    (r"^(conv_exp\.se)\.fc2\b", r"\1.expand"),
)
_VIT = (
    (r"^cls_token$", "cls_token"),
    (r"^pos_embed$", "pos_embed.pos_embed.pos_embed"),
    (r"^patch_embed\.backbone\.(\d)\.conv\.", r"patch_emb.\1.block.conv."),
    (r"^patch_embed\.backbone\.(\d)\.bn\.", r"patch_emb.\1.block.norm."),
    (r"^blocks\.(\d+)\.norm1\.", r"transformer.\1.pre_norm_mha.0."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"transformer.\1.pre_norm_mha.1.qkv_proj."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"transformer.\1.pre_norm_mha.1.out_proj."),
    (r"^blocks\.(\d+)\.norm2\.", r"transformer.\1.pre_norm_ffn.0."),
    (r"^blocks\.(\d+)\.mlp\.fc1\.", r"transformer.\1.pre_norm_ffn.1."),
    (r"^blocks\.(\d+)\.mlp\.fc2\.", r"transformer.\1.pre_norm_ffn.4."),
    (r"^norm\.", "post_transformer_norm."),
)
_TEXT = (
    (r"^text_projection$", "projection_layer"),
    (r"^token_embedding\.", "embedding_layer."),
    (r"^positional_embedding$", "positional_embedding.pos_embed.pos_embed"),
    (r"^ln_final\.", "final_layer_norm."),
    (r"^transformer\.resblocks\.", "transformer."),
    (r"\bln_1\b", "pre_norm_mha.0"),
    (r"\battn\.in_proj_", "pre_norm_mha.1.qkv_proj."),
    (r"\battn\b", "pre_norm_mha.1"),
    (r"\bln_2\b", "pre_norm_ffn.0"),
    (r"\bmlp\.c_fc\b", "pre_norm_ffn.1"),
    (r"\bmlp\.c_proj\b", "pre_norm_ffn.4"),
)


def vendor_name(name: str, vit: bool) -> str | None:
    """Return the vendor's name of a weight, None for the projection's bias.

    Args:
        name: name in this package, such as `visual.trunk.stem.0.conv_kxk.0.conv.weight`.
        vit: whether the image tower is a ViT.
    """
    if name.startswith(_PROJECTION):
        if name.endswith(".bias"):
            return None
        return "image_encoder.model." + ("classifier.proj" if vit else "head.proj")
    tower, _, rest = name.partition(".")
    if tower == "text":
        # Mixer blocks of the text tower are named as those of image towers.
        rest = _renamed(rest, _TEXT)
        return "text_encoder." + (rest if "pre_norm" in rest else _renamed(rest, _IMAGE))
    if tower == "visual":
        rest = rest.removeprefix("trunk.")
        return "image_encoder.model." + (_renamed(rest, _VIT) if vit else _flat(_renamed(rest, _IMAGE)))
    return name


def to_vendor(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state dict in the vendor's layout.

    Raises:
        UserError: If the layout has no name for a weight.
    """
    vit = is_vit(state)
    first = "patch_embed.backbone.0.bn.weight" if vit else "stem.0.conv_kxk.0.conv.weight"
    if f"visual.trunk.{first}" not in state or any(name.startswith(_FIFTH_STAGE) for name in state):
        raise UserError(
            "Expected MobileCLIP-S0, -S1, -S2, -B or -tiny before reparameterization, got a model that the vendor's "
            "layout has no names for: write the layout of open_clip."
        )
    written = {}
    for name, tensor in state.items():
        name_in_file = vendor_name(name, vit)
        if name_in_file is None:
            if tensor.any():
                raise UserError(
                    f"Expected zeros in {name}, which the vendor's layout has no name for, got other values: write the "
                    "layout of open_clip."
                )
            continue
        written[name_in_file] = _shaped(name, tensor, outwards=True).contiguous()
    return written


def from_vendor(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint of the vendor under the model's names; unknown weights keep the vendor's names.

    Args:
        model: one of MobileCLIP's, of the same size.
        state: the vendor's state dict.
    """
    expected = model.state_dict()
    names = {vendor_name(name, is_vit(expected)): name for name in expected}
    return {
        names.get(name, name): _shaped(names[name], tensor, outwards=False) if name in names else tensor
        for name, tensor in state.items()
    }


def is_vit(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has timm's ViT as image tower."""
    return "visual.trunk.cls_token" in state


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _flat(name: str) -> str:
    """Return the vendor's name of a part of a stage: the parts of all stages are in one list."""
    stage = re.match(r"stages\.(\d)\.(downsample|pos_emb|blocks)\.", name)
    if stage is None:
        return name
    number, module, rest = int(stage[1]), stage[2], name[stage.end() :]
    # stage 0, downsample, stage 1, downsample, stage 2, downsample, position, stage 3
    index = 2 * number + (number >= 3)
    if module == "blocks":
        return f"network.{index}.{rest}"
    if module == "pos_emb":
        return f"network.{index - 1}.{rest.replace('pos_enc.', 'pe.')}"
    return f"network.{2 * number - 1}.{rest}"


def _shaped(name: str, tensor: Tensor, outwards: bool) -> Tensor:
    """Transpose projections, and reshape positions to 4 dimensions and the scale to none, or back."""
    if name == "logit_scale":
        return tensor.reshape(()) if outwards else tensor
    if name.startswith(_PROJECTION):
        return tensor.T
    if name in ("visual.trunk.pos_embed", "text.positional_embedding"):
        dimensions = 4 if outwards else (3 if name.startswith("visual") else 2)
        while tensor.dim() < dimensions:
            tensor = tensor.unsqueeze(0)
        while tensor.dim() > dimensions:
            tensor = tensor.squeeze(0)
    return tensor
