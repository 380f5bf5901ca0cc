"""Trained models from outside that reinforce data sets: open_clip's by tag, in a folder or a file, and ours."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import open_clip
from open_clip.pretrained import get_pretrained_cfg
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ..base.frozen import FrozenTeacher
from ..mobileclip.models import PRESETS
from ..mobileclip.pretrained import Preprocessing, Pretrained, load_pretrained, of_training, preprocessing_of_training
from .attention import set_clip_attention

_CONFIG = "open_clip_config.json"


class Outside(NamedTuple):
    """A trained model: frozen, in eval mode, in float32.

    Attributes:
        network: the model.
        preprocessing: what it expects to be done with an image.
        tokenizer: turns texts into token ids, long [T, L].
        model: its name.
        weights: where its weights are from.
        sha256: of the weights.
    """

    network: Any  # CLIP, CustomTextCLIP or CoCa, which have no common type
    preprocessing: Preprocessing
    tokenizer: Callable[[list[str]], Tensor]
    model: str
    weights: str
    sha256: str


def load_outside(model: str | None, weights: str) -> Outside:
    """Make a model and load its weights.

    Activations are those of the weights: open_clip knows which of its tags were trained with QuickGELU, whatever the
    model is called, and only warns where that differs.

    Args:
        model: one of open_clip's or MobileCLIP's names; not used where `weights` is a folder, which tells it.
        weights: a tag of open_clip's, which is downloaded; a folder with `open_clip_config.json` and the weights; or a
            file: of open_clip's, the vendor's, or a checkpoint of a training here.

    Raises:
        FileNotFoundError: if there is no such file or folder.
        ValueError: if there is no such model or tag, or the weights are of another model.
        RuntimeError: if the weights cannot be read, downloaded or loaded.
    """
    path = Path(weights).expanduser()
    if path.is_dir() and not (path / METADATA).is_file():  # else a checkpoint in pieces
        network, preprocessing, tokenizer = _from_folder(path)
        model = path.resolve().name
    elif model is None:
        raise ValueError(f"Found the weights {weights!r} without a model, expected its name too, such as ViT-L-14.")
    elif _is_file_name(weights, path):
        network, preprocessing, tokenizer = _from_file(model, path)
    else:
        network, preprocessing, tokenizer = _from_tag(model, weights)
    network.float()
    set_clip_attention(network)
    fingerprint = FrozenTeacher(network).fingerprint()
    return Outside(network.eval(), preprocessing, tokenizer, model, weights, fingerprint)


def _is_file_name(weights: str, path: Path) -> bool:
    return path.suffix != "" or "/" in weights or path.exists()


_Loaded = tuple[nn.Module, Preprocessing, Callable[[list[str]], Tensor]]


def _from_folder(path: Path) -> _Loaded:
    if not (path / _CONFIG).is_file():
        raise FileNotFoundError(
            f"Found no {_CONFIG} in the folder {str(path)!r}, expected a model as `vlightning export "
            "--layout open_clip` and open_clip write it: correct the path."
        )
    source = f"local-dir:{path}"
    _refuse_remote_code(path)
    try:
        network = open_clip.create_model(source, require_pretrained=True)
        return network, _preprocessing(network), open_clip.get_tokenizer(source)
    except Exception as error:  # open_clip raises whatever its parts raise
        raise RuntimeError(
            f"The model in the folder {str(path)!r} cannot be loaded ({_shortened(error)}): get the folder again."
        ) from error


def _refuse_remote_code(path: Path) -> None:
    """Refuse what open_clip would hand on to transformers, which then runs the Python files of the folder.

    Raises:
        ValueError: If the folder's tokenizer asks for that.
    """
    try:
        options = json.loads((path / _CONFIG).read_text(encoding="utf-8"))["model_cfg"]["text_cfg"]["tokenizer_kwargs"]
    except (ValueError, LookupError, TypeError):  # open_clip says what is wrong, if anything is
        return
    if options.get("trust_remote_code"):
        raise ValueError(
            f"Found trust_remote_code in the {_CONFIG} of {str(path)!r}, which would run the folder's Python files: "
            "take it out, if the tokenizer works without."
        )


def _from_file(model: str, path: Path) -> _Loaded:
    if not path.exists():
        raise FileNotFoundError(f"Found no file {str(path)!r}, expected the weights of {model}: correct the path.")
    if model not in PRESETS and "multimodal_cfg" in (open_clip.get_model_config(model) or {}):
        try:
            network = open_clip.create_model(model, pretrained=str(path))
        except Exception as error:
            raise RuntimeError(
                f"The weights {str(path)!r} cannot be loaded into {model} ({_shortened(error)}): give a file of that "
                "model."
            ) from error
        return network, _preprocessing(network), open_clip.get_tokenizer(model)
    trained = _of_training(model, path) or load_pretrained(model, path)
    # Of MobileCLIP's names open_clip does not know all, and these have its plain tokenizer.
    tokenizer = open_clip.get_tokenizer("" if model in PRESETS else model, trained.model.context_length)
    return trained.model, trained.preprocessing, tokenizer


def _of_training(model: str, path: Path) -> Pretrained | None:
    """The network of a training here, with what its images were; None where the file is something else."""
    if not path.is_dir() and path.suffix != ".ckpt":
        return None
    content = AtomicCheckpointIO().load_checkpoint(path)
    arguments = content.get("hyper_parameters", {})
    if "model" not in arguments:
        return None
    if arguments["model"] != model:
        raise ValueError(f"Found a training of {arguments['model']} in {str(path)!r}, expected {model}: correct it.")
    network, _ = of_training(content, str(path))
    return Pretrained(network, Preprocessing.of(preprocessing_of_training(content), repr(str(path))))


def _from_tag(model: str, tag: str) -> _Loaded:
    name = model.removesuffix("-quickgelu")  # the same model, of which open_clip lists all tags
    known = open_clip.list_pretrained_tags_by_model(name)
    if not known:
        raise ValueError(
            f"open_clip has no weights of a model {model!r}: give a file or a folder, or a name that "
            "`open_clip.list_pretrained()` lists."
        )
    listed: dict[str, Any] = get_pretrained_cfg(name, tag)
    if not listed:
        raise ValueError(f"open_clip has no weights {tag!r} of {model}; its tags are {', '.join(known)}.")
    quick = bool(listed.get("quick_gelu", False))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="QuickGELU mismatch")  # it would be another function
            network = open_clip.create_model(name, pretrained=tag, force_quick_gelu=quick, require_pretrained=True)
        return network, _preprocessing(network), open_clip.get_tokenizer(name)
    except Exception as error:
        raise RuntimeError(
            f"The weights {tag!r} of {model} cannot be loaded ({_shortened(error)}): download them on a machine with "
            "a network, and give the file or its folder."
        ) from error


def _preprocessing(network: nn.Module) -> Preprocessing:
    """What open_clip has noted on a model that it made."""
    noted: Any = open_clip.get_model_preprocess_cfg(network)
    side = noted["size"]
    size = side if isinstance(side, int) else side[0]
    return Preprocessing(size, noted["mean"], noted["std"], noted["interpolation"], noted["resize_mode"])


def _shortened(error: Exception) -> str:
    """Its message on one line; torch's say on the second what does not fit."""
    return shorten(str(error), 300, placeholder=" ...").removesuffix(".")
