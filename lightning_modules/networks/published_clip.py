"""Published image-text models: open_clip's by tag, folder or file, MobileCLIP's by file, and trainings here."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import open_clip
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from open_clip import CustomTextCLIP
from open_clip.pretrained import get_pretrained_cfg
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.names import did_you_mean
from ...common.preprocessing import Preprocessing
from ...common.tokenizers import saved_tokenizer
from ..core.checkpoints import is_checkpoint, is_folder, read_folder
from ..core.frozen import Frozen, reads_weights
from ..core.programs import padding_tokenizer
from ..core.towers import SPACE, Space, tower_digest_of
from .attention import set_clip_attention
from .clip.files import CONFIG_NAME, folder_of, is_tag
from .clip.models import build_model, model_config, preset_of
from .clip.preprocessing import preprocessing_of, preprocessing_of_training
from .clip.shapes import Model, resolved, text_prefix_of
from .clip.text_encoder import EncoderTower
from .clip.weights import load_pretrained, network_of_training

RANDOM = "random"
"""Tag of untrained weights, to try a command without a download."""

Tokenizer = Callable[[list[str]], Tensor]


class PublishedCLIP(NamedTuple):
    """A trained model: frozen, in eval mode, in float32.

    Attributes:
        network: the model.
        preprocessing: its image preprocessing.
        tokenizer: texts to token ids, long [T, L].
        model: its name.
        weights: the source of its weights.
        sha256: fingerprint of the weights.
        space: the space of its embeddings; None without fingerprints, or for a network without separate towers.
    """

    network: Any  # CLIP, CustomTextCLIP or CoCa, which have no common type
    preprocessing: Preprocessing
    tokenizer: Tokenizer
    model: str
    weights: str
    sha256: str
    space: Space | None = None


@dataclass
class TowerTokenizer:
    """Tokenizer of a text encoder of transformers in a training here, which loader workers can receive.

    Args:
        encode: tokenizer of the `tokenizers` library that pads and cuts texts to a fixed length.
        prefix: text before each text.
    """

    encode: Any
    prefix: str

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Map texts to token ids, long [T, L]."""
        encodings = self.encode.encode_batch([self.prefix + text for text in texts])
        return torch.tensor([encoding.ids for encoding in encodings])


class Loaded(NamedTuple):
    """A network with its preprocessing and its tokenizer."""

    network: nn.Module
    preprocessing: Preprocessing
    tokenizer: Tokenizer


def load_published(model: str | None, weights: str, digest: bool = True) -> PublishedCLIP:
    """Build a model and load its weights.

    The activation is that of the weights: open_clip knows which of its tags were trained with QuickGELU, independent of
    the name of the model, and only warns if both differ.

    Args:
        model: a name of open_clip's or MobileCLIP's; ignored where `weights` is a folder, and not needed for a
            checkpoint of a training here.
        weights: a tag of open_clip, which is downloaded; "random" for untrained weights of a model of open_clip; a
            folder with `open_clip_config.json` and the weights, or an export of a pair of towers here; or a file of
            open_clip's, of the vendor's, or a checkpoint of a training here.
        digest: whether the fingerprint is computed, for which all weights are read; else it is empty.

    Raises:
        UserError: If there is no such file, folder, model or tag, or the weights cannot be loaded into the model.
    """
    folder = folder_of(weights) if reads_weights() else None
    path = Path(weights).expanduser()
    trained = None if model is not None and folder is None else training_of(path)
    if trained is not None:
        loaded = _of_training(trained, repr(weights))
        model = str(resolved(trained["hyper_parameters"]["model"]))
    elif folder is not None:
        loaded = _from_folder(folder)
        model = folder.resolve().name
    elif model is None:
        raise UserError(f"Expected the name of the model of the weights {weights!r}, got none: add it, e.g. ViT-L-14.")
    elif not reads_weights():
        loaded = _without_weights(model)
    elif not is_tag(weights):
        loaded = _from_file(model, Path(weights).expanduser())
    elif weights == RANDOM:
        loaded = _untrained(model)
    else:
        loaded = _from_tag(model, weights)
    network = loaded.network.float()
    set_clip_attention(network)
    frozen = Frozen(network)
    fingerprint = frozen.fingerprint() if digest else ""
    space = Space.of(trained or {}) or (_own_space(network, f"{model} ({weights})") if digest else None)
    return PublishedCLIP(
        network.eval(), loaded.preprocessing, loaded.tokenizer, str(model), weights, fingerprint, space
    )


def _own_space(network: nn.Module, name: str) -> Space | None:
    """Return the space of a pair that was trained together."""
    if not reads_weights():
        return None
    image, text = (tower_digest_of(network, side) for side in ("image", "text"))
    return None if image is None or text is None else Space(name, image, text)


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
    return _loaded(network, model)


def _without_weights(model: str) -> Loaded:
    if not _is_captioner(model):
        pair = build_model(model, context_length=None)
        return Loaded(pair, preprocessing_of(model), _tokenizer(model, pair))
    return _loaded(open_clip.create_model(model, device=torch.get_default_device()), model)


def _from_folder(path: Path) -> Loaded:
    if not (path / CONFIG_NAME).is_file():
        raise UserError(
            f"Expected a model as `vlightning export --layout open_clip` and open_clip write it, found no "
            f"{CONFIG_NAME} in the folder {str(path)!r}: correct the path."
        )
    source = f"local-dir:{path}"
    _refuse_remote_code(path)
    try:
        network = open_clip.create_model(source, require_pretrained=True, **_moved_encoder(path))
        return _loaded(network, source)
    except Exception as error:  # open_clip passes on any error of its parts
        raise UserError(
            f"Expected a model that open_clip can load in the folder {str(path)!r}, got an error "
            f"({_shortened(error)}): get the folder again."
        ) from error


def _moved_encoder(path: Path) -> dict[str, Any]:
    """Return open_clip's option for a folder with the configuration of its text encoder, which names the folder."""
    text = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))["model_cfg"]["text_cfg"]
    if "hf_model_name" not in text or not (path / "config.json").is_file():
        return {}
    return {"text_cfg": text | {"hf_model_name": str(path), "hf_model_pretrained": False}}


def _refuse_remote_code(path: Path) -> None:
    """Refuse a tokenizer with trust_remote_code, for which transformers would run Python files of the folder."""
    try:
        config = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
        options = config["model_cfg"]["text_cfg"]["tokenizer_kwargs"]
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
    if not _is_captioner(model):
        return _pair_from_file(model, path)
    try:
        network = open_clip.create_model(model, pretrained=str(path))
    except Exception as error:
        raise UserError(
            f"Expected weights of {model} in {str(path)!r}, got an error ({_shortened(error)}): give a file of that "
            "model."
        ) from error
    return _loaded(network, model)


def _pair_from_file(name: str, path: Path) -> Loaded:
    """Read a pair of towers: the vendor's, open_clip's, or the evaluated network of a training here."""
    content = AtomicCheckpointIO().load_checkpoint(path) if path.is_dir() or path.suffix == ".ckpt" else {}
    arguments = content.get("hyper_parameters", {})
    if "model" not in arguments:
        network, preprocessing = load_pretrained(name, path)
        return Loaded(network, preprocessing, _tokenizer(name, network))
    trained = resolved(arguments["model"])
    if trained != resolved(name):
        raise UserError(f"Expected a training of {name} in {str(path)!r}, got one of {trained}: correct it.")
    return _of_training(content, repr(str(path)))


def training_of(path: Path) -> Mapping[str, Any] | None:
    """Return the checkpoint of a pair of towers that was trained here, or its export in the same form; else None."""
    if is_checkpoint(path):
        content: Mapping[str, Any] = AtomicCheckpointIO().load_checkpoint(path)
        return content if "model" in content.get("hyper_parameters", {}) else None
    if not is_folder(path) or (path / CONFIG_NAME).is_file():
        return None
    config, state = read_folder(path)
    tokenizer = path / "tokenizer.json"
    data: dict[str, Any] = {"preprocessing": config.get("preprocessing")}
    if tokenizer.is_file():
        data["tokenizer"] = tokenizer.read_text(encoding="utf-8")
    content = {"hyper_parameters": config["arguments"], "state_dict": state, "data": data}
    return content | ({SPACE: config[SPACE]} if config.get(SPACE) else {})


def _of_training(content: Mapping[str, Any], source: str) -> Loaded:
    """Return the evaluated network of a training here, with its preprocessing and its tokenizer."""
    network, _ = network_of_training(content, source)
    preprocessing = Preprocessing.from_dict(preprocessing_of_training(content), source)
    name = resolved(content["hyper_parameters"]["model"])
    if not isinstance(network.text, EncoderTower):
        return Loaded(network, preprocessing, _tokenizer(name, network))
    text, _ = saved_tokenizer(content, model_config(name)["text_cfg"].get("hf_tokenizer_name"))
    if text is None:
        raise UserError(f"Expected the tokenizer of the text tower in {source}, found none: export it with one.")
    encode = padding_tokenizer(text, network.context_length, network.text.pad_token_id)
    return Loaded(network, preprocessing, TowerTokenizer(encode, text_prefix_of(name)))


def _is_captioner(name: str) -> bool:
    """Return whether a model of open_clip's is a captioner, which open_clip loads by itself."""
    return preset_of(name) is None and "multimodal_cfg" in (open_clip.get_model_config(name) or {})


def _tokenizer(name: Model, network: CustomTextCLIP) -> Tokenizer:
    # MobileCLIP's models have open_clip's default tokenizer; open_clip does not know all of their names.
    open_clip_name = "" if preset_of(name) is not None else str(name)
    tokenizer: Tokenizer = open_clip.get_tokenizer(open_clip_name, network.context_length)
    return tokenizer


def _from_tag(model: str, tag: str) -> Loaded:
    name = model.removesuffix("-quickgelu")  # the same model; open_clip lists all tags under this name
    tags = open_clip.list_pretrained_tags_by_model(name)
    if not tags:
        raise UserError(
            f"Expected a model with weights of open_clip, got {model!r}: give a file or a folder, or a name that "
            "`open_clip.list_pretrained()` lists."
        )
    pretrained: dict[str, Any] = get_pretrained_cfg(name, tag)
    if not pretrained:
        raise UserError(f"Expected one of open_clip's tags of {model}, got {tag!r}: choose one of {', '.join(tags)}.")
    quick = bool(pretrained.get("quick_gelu", False))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="QuickGELU mismatch")  # a different function
            network = open_clip.create_model(name, pretrained=tag, force_quick_gelu=quick, require_pretrained=True)
        return _loaded(network, name)
    except Exception as error:
        raise UserError(
            f"Expected the weights {tag!r} of {model}, got an error ({_shortened(error)}): download them on a machine "
            "with a network, and give the file or its folder."
        ) from error


def _loaded(network: nn.Module, name: str) -> Loaded:
    """Return a network that open_clip built under a name, with its preprocessing and its tokenizer."""
    preprocessing = Preprocessing.of_open_clip(open_clip.get_model_preprocess_cfg(network))
    return Loaded(network, preprocessing, open_clip.get_tokenizer(name))


def _shortened(error: Exception) -> str:
    """Return the message on one line; torch lists mismatches from the second line on."""
    return shorten(str(error), 300, placeholder=" ...").removesuffix(".")
