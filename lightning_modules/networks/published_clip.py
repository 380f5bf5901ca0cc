"""Published image-text models: open_clip's by tag, folder or file, MobileCLIP's files, and own trainings."""

import json
import warnings
from pathlib import Path
from textwrap import shorten
from typing import Any

import open_clip
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from open_clip.pretrained import get_pretrained_cfg
from torch import nn

from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...common.errors import UserError
from ...common.names import did_you_mean
from ..core.clip_preprocessing import Preprocessing
from ..core.file_readers import Loaded, PublishedCLIP
from ..core.frozen import Frozen, reads_weights
from .attention import set_clip_attention
from .clip.trained import read_published
from .open_clip_folder import CONFIG_NAME

RANDOM = "random"
"""Tag of untrained weights, to try a command without a download."""


def load_published(model: str | None, weights: str) -> PublishedCLIP:
    """Build a model and load its weights.

    The activation is that of the weights: open_clip knows which of its tags were trained with QuickGELU, independent of
    the name of the model, and only warns if both differ.

    Args:
        model: a name of open_clip or of MobileCLIP; ignored where `weights` is a folder.
        weights: a tag of open_clip, which is downloaded; "random" for untrained weights of a model of open_clip; a
            folder with `open_clip_config.json` and the weights; or a file of open_clip or of MobileCLIP's vendor, or a
            checkpoint of a training here.

    Raises:
        UserError: If there is no such file, folder, model or tag, or the weights cannot be loaded into the model.
    """
    path = Path(weights).expanduser()
    if not reads_weights():
        loaded = _without_weights(model, path)
    elif path.is_dir() and not (path / METADATA).is_file():  # else a sharded checkpoint
        loaded = _from_folder(path)
        model = path.resolve().name
    elif model is None:
        raise UserError(_unnamed(weights))
    elif path.suffix or "/" in weights or path.exists():
        loaded = _from_file(model, path)
    elif weights == RANDOM:
        loaded = _untrained(model)
    else:
        loaded = _from_tag(model, weights)
    network = loaded.network.float()
    set_clip_attention(network)
    fingerprint = Frozen(network).fingerprint()
    return PublishedCLIP(network.eval(), loaded.preprocessing, loaded.tokenizer, str(model), weights, fingerprint)


def _unnamed(weights: str) -> str:
    return f"Expected the name of the model of the weights {weights!r}, got none: add it, e.g. ViT-L-14."


def _untrained(model: str) -> Loaded:
    """Build a model with the same random weights in every process."""
    if model not in open_clip.list_models():
        raise UserError(
            f"Expected a model of open_clip for the weights {RANDOM!r}, got {model!r}: "
            f"{did_you_mean(model, open_clip.list_models())}"
        )
    with isolate_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no weights are loaded
        torch.manual_seed(0)
        network = open_clip.create_model(model)
    return Loaded(network, _preprocessing(network), open_clip.get_tokenizer(model))


def _without_weights(model: str | None, path: Path) -> Loaded:
    if model is None:
        raise UserError(_unnamed(str(path)))
    if (loaded := read_published(model, path)) is not None:
        return loaded
    network = open_clip.create_model(model, device=torch.get_default_device())
    return Loaded(network, _preprocessing(network), open_clip.get_tokenizer(model))


def _from_folder(path: Path) -> Loaded:
    if not (path / CONFIG_NAME).is_file():
        raise UserError(
            f"Expected a model as `vlightning export --layout open_clip` and open_clip write it, found no "
            f"{CONFIG_NAME} in the folder {str(path)!r}: correct the path."
        )
    source = f"local-dir:{path}"
    _refuse_remote_code(path)
    try:
        network = open_clip.create_model(source, require_pretrained=True)
        return Loaded(network, _preprocessing(network), open_clip.get_tokenizer(source))
    except Exception as error:  # open_clip passes on any error of its parts
        raise UserError(
            f"Expected a model that open_clip can load in the folder {str(path)!r}, got an error "
            f"({_shortened(error)}): get the folder again."
        ) from error


def _refuse_remote_code(path: Path) -> None:
    """Refuse a tokenizer with trust_remote_code, for which transformers would run Python files of the folder."""
    try:
        options = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))["model_cfg"]["text_cfg"][
            "tokenizer_kwargs"
        ]
    except (ValueError, LookupError, TypeError):  # open_clip reports a malformed configuration
        return
    if options.get("trust_remote_code"):
        raise UserError(
            f"Expected a tokenizer without trust_remote_code in the {CONFIG_NAME} of {str(path)!r}, got one that would "
            "run the folder's Python files: remove trust_remote_code, if the tokenizer works without."
        )


def _from_file(model: str, path: Path) -> Loaded:
    if not path.exists():
        raise UserError(f"Expected the weights of {model}, found no file {str(path)!r}: correct the path.")
    if (loaded := read_published(model, path)) is not None:
        return loaded
    try:
        network = open_clip.create_model(model, pretrained=str(path))
    except Exception as error:
        raise UserError(
            f"Expected weights of {model} in {str(path)!r}, got an error ({_shortened(error)}): give a file of that "
            "model."
        ) from error
    return Loaded(network, _preprocessing(network), open_clip.get_tokenizer(model))


def _from_tag(model: str, tag: str) -> Loaded:
    name = model.removesuffix("-quickgelu")  # the same model; open_clip lists all tags under this name
    known = open_clip.list_pretrained_tags_by_model(name)
    if not known:
        raise UserError(
            f"Expected a model with weights of open_clip, got {model!r}: give a file or a folder, or a name that "
            "`open_clip.list_pretrained()` lists."
        )
    listed: dict[str, Any] = get_pretrained_cfg(name, tag)
    if not listed:
        raise UserError(f"Expected one of open_clip's tags of {model}, got {tag!r}: choose one of {', '.join(known)}.")
    quick = bool(listed.get("quick_gelu", False))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="QuickGELU mismatch")  # a different function
            network = open_clip.create_model(name, pretrained=tag, force_quick_gelu=quick, require_pretrained=True)
        return Loaded(network, _preprocessing(network), open_clip.get_tokenizer(name))
    except Exception as error:
        raise UserError(
            f"Expected the weights {tag!r} of {model}, got an error ({_shortened(error)}): download them on a machine "
            "with a network, and give the file or its folder."
        ) from error


def _preprocessing(network: nn.Module) -> Preprocessing:
    """Return the preprocessing that open_clip has stored on a model it made."""
    noted: Any = open_clip.get_model_preprocess_cfg(network)
    side = noted["size"]
    size = side if isinstance(side, int) else side[0]
    return Preprocessing(size, noted["mean"], noted["std"], noted["interpolation"], noted["resize_mode"])


def _shortened(error: Exception) -> str:
    """Return the message on one line; torch lists mismatches from the second line on."""
    return shorten(str(error), 300, placeholder=" ...").removesuffix(".")
