"""Self-supervised teachers: vision transformers of timm, whose class token is the target (thesis, S-SMKE).

Shapes: B images of S pixels a side, N tokens, width E.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from ...common.errors import UserError
from ..core.fitting import load_fitting
from ..core.frozen import Frozen, reads_weights
from ..networks.vit import read_vision_weights

_SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"
_NOT_IN_TOWER = ("norm.", "fc_norm.", "head", "lm_head", "mask_token", "cls_pt_layers.", "decoder_", "logit_scale")


class ClassToken(nn.Module):
    """The class token of a vision transformer of timm after its last block, before its last norm.

    Args:
        network: the vision transformer.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        network.norm = nn.Identity()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, S, S] to class tokens [B, E]."""
        tokens: Tensor = self.network.forward_features(image)
        return tokens[:, 0]


def build_class_token(name: str, width: int, tag: str | None = None) -> ClassToken:
    """Build a vision transformer of timm.

    Args:
        name: name of the model, also as "timm/<model>".
        width: width E of its tokens.
        tag: tag of timm's weights to download, such as "dino"; None: random weights.

    Raises:
        UserError: If there is no such model, it does not have exactly one token before the patches, or another width.
    """
    model = name.removeprefix("timm/")
    full = model if tag is None else f"{model}.{tag}"
    try:
        network: Any = timm.create_model(full, pretrained=tag is not None, num_classes=0, global_pool="token")
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UserError(
            f"Expected a vision transformer of timm as the teacher, got {full!r} ({error}): set model.teacher.name."
        ) from error
    prefix = getattr(network, "num_prefix_tokens", 1 if hasattr(network, "cls_token") else 0)
    if prefix != 1:
        raise UserError(
            f"Expected a teacher with one token before the patches, the class token, got {name!r} with {prefix}: set "
            "model.teacher.name to another vision transformer."
        )
    if network.num_features != width:
        raise UserError(
            f"Expected the teacher's width in model.num_classes, {network.num_features} of {name!r}, got {width}: "
            "correct it."
        )
    return ClassToken(network)


def load_class_token(frozen: Frozen[Any], name: str, source: str | None, width: int) -> None:
    """Build a teacher, load its weights, and record their origin.

    Args:
        frozen: where the network is put.
        name: name of timm's model.
        source: a file of its state dict, which may be that of BEiT's pre-training, or a tag of timm's weights.
        width: width E of its tokens.

    Raises:
        UserError: If there is no source, or its tensors are not those of the model.
    """
    if not reads_weights():
        network = build_class_token(name, width)
    elif source is None:
        raise UserError(f"Expected weights of the teacher {name}, got none: set {frozen.argument}.")
    elif "/" not in source and Path(source).suffix == "" and not Path(source).exists():
        network = build_class_token(name, width, source)
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise UserError(f"Expected a file with the teacher's weights, got {source!r}: correct {frozen.argument}.")
        network = build_class_token(name, width)
        state = _tower(read_vision_weights(str(path)), network.network)
        load_fitting(network.network, state, f"the teacher {name!r} from {source!r}")
    frozen.network = network.requires_grad_(False)
    frozen.record(name, str(source))


def _tower(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the blocks and of what is before them.

    BEiT shares a table of relative positions between its blocks in pre-training; timm's models have one per block.
    """
    own = network.state_dict()
    kept = {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith(_NOT_IN_TOWER) and not name.endswith("relative_position_index")
    }
    if _SHARED_TABLE in kept and _SHARED_TABLE not in own:
        table = kept.pop(_SHARED_TABLE)
        kept |= {name: table for name in own if re.fullmatch(r"blocks\.\d+\.attn\.relative_position_bias_table", name)}
    return kept
