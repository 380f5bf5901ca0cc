"""A tiny image tower for tests and quickstarts, with every kind of layer that MobileCLIP-S0 has."""

from functools import partial
from typing import Any

from timm.models import FastVit, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.fastvit import RepConditionalPosEnc

# timm looks for this name when it registers the model, and warns without it.
default_cfgs = generate_default_cfgs({"fastvit_mci_tiny.untrained": {"input_size": (3, 64, 64), "num_classes": 128}})


@register_model
def fastvit_mci_tiny(pretrained: bool = False, **kwargs: Any) -> FastVit:
    """Build the tower: 0.7 M parameters, stride 32, images of any size.

    Args:
        pretrained: must be False, there are no trained weights.
        **kwargs: arguments of timm's FastVit.
    """
    own = {
        "layers": (1, 1, 2, 1),
        "embed_dims": (24, 48, 96, 192),
        "mlp_ratios": (3, 3, 3, 3),
        "se_downsamples": (False, False, True, True),
        "pos_embs": (None, None, None, partial(RepConditionalPosEnc, spatial_shape=(7, 7))),
        "token_mixers": ("repmixer", "repmixer", "repmixer", "attention"),
        "lkc_use_act": True,
    }
    return build_model_with_cfg(FastVit, "fastvit_mci_tiny", pretrained, **(own | kwargs))
