"""Files and folders of a pair of towers in the layouts of open_clip and of the vendor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip import CustomTextCLIP
from open_clip.hf_configs import arch_dict
from safetensors.torch import save_file
from torch import nn

from ....callbacks import AtomicCheckpointIO
from ....callbacks.checkpoints.sharded_checkpoint import METADATA
from ....common.errors import UserError
from ....common.files import check_free, replacing, writing
from ....common.preprocessing import Preprocessing
from ...core.transformers_files import save_tokenizer, special_token_ids
from .models import clip_of_config, has_vendor_stem, model_config, preset_of
from .shapes import Model, resolved
from .text_encoder import CONFIG, OPEN_CLIP_POOLERS
from .vendor_layout import is_vit, to_vendor

CONFIG_NAME = "open_clip_config.json"
WEIGHTS_NAME = "open_clip_model.safetensors"
"""File names that open_clip looks for in a folder."""
_LOCAL = "local-dir:"


def folder_of(weights: str) -> Path | None:
    """Return the folder of a model of open_clip's, perhaps after `local-dir:`; None for anything else."""
    path = Path(weights.removeprefix(_LOCAL)).expanduser()
    # A folder with that file is a sharded checkpoint.
    is_model = path.is_dir() and not (path / METADATA).is_file()
    return path if is_model or weights.startswith(_LOCAL) else None


def is_tag(weights: str) -> bool:
    """Return whether the name of weights is one of open_clip's tags, and not a path."""
    path = Path(weights).expanduser()
    return not ("/" in weights or path.suffix or path.exists())


def save_vendor(model: CustomTextCLIP, path: str | Path) -> None:
    """Write a `.pt` file that the vendor's code loads.

    Args:
        model: MobileCLIP-S0, -S1, -S2 or -B, not reparameterized.
        path: the file.

    Raises:
        UserError: If the vendor's code has no such model.
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    state = model.state_dict()
    if is_vit(state) and not has_vendor_stem(model):
        raise UserError(
            "Expected a ViT with the vendor's stem, got timm's, which the vendor's code would run with another stem: "
            "write the layout of open_clip."
        )
    AtomicCheckpointIO().save_checkpoint(to_vendor(state), Path(path).expanduser())


def save_open_clip(
    model: CustomTextCLIP, name: Model, preprocessing: Preprocessing, folder: str | Path, tokenizer: str | None = None
) -> None:
    """Write a folder that `open_clip.create_model_and_transforms("local-dir:<folder>")` loads, atomically.

    Args:
        model: the network, not reparameterized.
        name: the name that it was built by.
        preprocessing: its image preprocessing.
        folder: a new or an empty folder.
        tokenizer: the tokenizer of a text encoder of transformers, as JSON text; its configuration is written too.

    Raises:
        UserError: If open_clip has no such model, or the folder exists and is not empty.
        OSError: If it cannot be written.
    """
    preprocessing.as_open_clip()  # refuses what the configuration cannot express, before the model is compared
    check_free(Path(folder).expanduser().absolute())
    config = _open_clip_config(model, name, preprocessing.image_size)
    write_open_clip(model, config, preprocessing, folder, tokenizer)


def write_open_clip(
    model: nn.Module,
    config: Mapping[str, Any],
    preprocessing: Preprocessing,
    folder: str | Path,
    tokenizer: str | None = None,
) -> None:
    """Write a folder for `open_clip.create_model_and_transforms("local-dir:<folder>")`, atomically.

    Args:
        model: the network.
        config: the configuration that open_clip builds it from.
        preprocessing: its image preprocessing.
        folder: a new or an empty folder.
        tokenizer: as in `save_open_clip`.

    Raises:
        UserError: If open_clip's configuration cannot express the preprocessing, or the folder exists and is not empty.
        OSError: If it cannot be written.
    """
    target = Path(folder).expanduser().absolute()
    text = dict(config["text_cfg"])
    context_length = text.get("context_length")
    encoder = text.pop(CONFIG, None)
    if encoder is not None:
        # open_clip reads the encoder's configuration by this name, and the tokenizer from the folder itself.
        text |= {"hf_model_name": str(target), "hf_model_pretrained": False, "hf_tokenizer_name": str(target)}
    check_free(target)
    # open_clip's scale and bias are of shape [].
    state = {
        key: tensor.reshape(()) if key in ("logit_scale", "logit_bias") else tensor.contiguous()
        for key, tensor in model.state_dict().items()
    }
    built = dict(config) | {"text_cfg": text}
    if "logit_bias" in state:  # open_clip takes one for a model that is configured with one only
        built["init_logit_bias"] = state["logit_bias"].item()
    content = {"model_cfg": built, "preprocess_cfg": preprocessing.as_open_clip()}
    with replacing(target) as staged, writing(target):
        staged.mkdir()
        save_file(state, staged / WEIGHTS_NAME, {"format": "pt"})
        (staged / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if encoder is not None:
            (staged / "config.json").write_text(json.dumps(encoder, indent=2) + "\n", encoding="utf-8")
        if encoder is not None and tokenizer is not None:
            save_tokenizer(tokenizer, staged, special_token_ids(tokenizer), context_length)


def _open_clip_config(model: CustomTextCLIP, name: Model, image_size: int) -> dict[str, Any]:
    """Return the configuration that open_clip builds this very model from."""
    name = resolved(name)
    preset = preset_of(name)
    mixers = preset is not None and preset.mixers
    if mixers or has_vendor_stem(model):
        addition = "the mixers of its text tower" if mixers else "the vendor's stem"
        raise UserError(
            f"Expected a model that open_clip can build, got {name} with {addition}: write the layout 'vendor'."
        )
    config = model_config(name, image_size, model.context_length)
    text = config["text_cfg"]
    if CONFIG in text:
        _check_encoder(text)
    with torch.device("meta"):
        open_clips = clip_of_config(config)
    expected = _shapes(open_clips)
    shapes = _shapes(model)
    differing = sorted(key for key in expected.keys() | shapes.keys() if expected.get(key) != shapes.get(key))
    if differing:
        raise UserError(
            f"Expected the {name} that open_clip builds, not reparameterized and a ViT of timm in its own image size, "
            f"got {len(differing)} other weights ({differing[0]}, ...): write another layout."
        )
    return config


def _check_encoder(text: Mapping[str, Any]) -> None:
    """Refuse encoders and poolings of transformers that open_clip cannot build.

    Raises:
        UserError: If it cannot.
    """
    kind = text[CONFIG]["model_type"]
    pooling = text.get("hf_pooler_type", "mean_pooler")
    if kind not in arch_dict or pooling not in OPEN_CLIP_POOLERS.values():
        raise UserError(
            f"Expected a text encoder that open_clip builds ({', '.join(arch_dict)}) pooled as there, got "
            f"{kind} with {pooling}: write another layout."
        )


def _shapes(model: CustomTextCLIP) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items() if not key.startswith("logit_")}
