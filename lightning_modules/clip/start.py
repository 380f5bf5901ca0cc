"""The published model that a fine-tuning starts with: which towers and which weights."""

import json
from pathlib import Path
from typing import Any

import open_clip
from lightning.pytorch.utilities import rank_zero_info
from open_clip import CustomTextCLIP
from open_clip.model import convert_to_custom_text_state_dict
from open_clip.pretrained import get_pretrained_cfg

from ...common.errors import UserError
from ..networks.clip.files import CONFIG_NAME, folder_of, is_tag
from ..networks.clip.models import PRESETS, model_config
from ..networks.clip.pair import TowerPair
from ..networks.clip.shapes import Model, OpenClipConfig, resolved
from ..networks.clip.text_encoder import with_config
from ..networks.clip.weights import LongerTexts, load_state, load_weights
from ..networks.published_clip import load_published

_QUICK = "-quickgelu"


def model_of(model: Model | None, weights: str | None) -> Model:
    """Return the model to build, as a name or as plain fields, independent of files.

    Args:
        model: as in `build_model`; may be None for a folder.
        weights: a tag of open_clip's, which also selects QuickGELU; a file; or a folder of open_clip's, perhaps after
            `local-dir:`.

    Raises:
        UserError: If there is no such model, folder or tag.
    """
    named = None if model is None else resolved(model)
    if isinstance(named, (OpenClipConfig, TowerPair)):  # of a checkpoint, which does not need the folder
        return named
    folder = None if weights is None else folder_of(weights)
    if folder is not None:
        return OpenClipConfig(folder.resolve().name, with_config(_config_of(folder), folder))
    if named is None:
        raise UserError(
            "Expected the name of the model as model.model, got none: add it, such as ViT-B-32, or give a folder with "
            f"{CONFIG_NAME} as model.weights."
        )
    if (
        weights is not None
        and is_tag(weights)
        and isinstance(named, str)
        and named not in PRESETS
        and not named.endswith(_QUICK)
    ):
        quick = f"{named}{_QUICK}"
        if get_pretrained_cfg(named, str(weights)).get("quick_gelu"):
            if quick in open_clip.list_models():
                return quick
            return OpenClipConfig(quick, model_config(named, None, None) | {"quick_gelu": True})
    return named


def load_start(
    network: CustomTextCLIP,
    model: Model,
    name: Model | None,
    weights: str,
    longer_texts: LongerTexts | None = None,
) -> None:
    """Load published weights into towers that `build_model` made, and say so.

    Args:
        network: the towers.
        model: result of `model_of`.
        name: the model as the user gave it.
        weights: as in `model_of`.
        longer_texts: as in `load_state`.

    Raises:
        UserError: If there are no such weights, or they are of another model.
    """
    folder = folder_of(weights)
    if folder is None and not is_tag(weights):
        rank_zero_info(load_weights(network, model, weights, longer_texts))
        return
    published = load_published(None if folder else str(name), str(folder or weights))
    state = convert_to_custom_text_state_dict(published.network.state_dict())
    rank_zero_info(load_state(network, model, dict(state), repr(weights), "the weights", longer_texts=longer_texts))


def needed_tokenizer(model: Model) -> str | None:
    """Return the hub name of the tokenizer that a model was trained with; None for CLIP's own."""
    name: str | None = model_config(model, None, None)["text_cfg"].get("hf_tokenizer_name")
    return name


def _config_of(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_NAME
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["model_cfg"]
    except (OSError, ValueError, LookupError) as error:
        raise UserError(
            f"Expected a folder with an {CONFIG_NAME} of open_clip, found none that can be read in {str(folder)!r}: "
            "correct model.weights."
        ) from error
    return config
