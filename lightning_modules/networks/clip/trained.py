"""The network of a training of a pair of towers, read from its checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
from open_clip import CustomTextCLIP
from torch import Tensor

from ....callbacks import AtomicCheckpointIO
from ....common.errors import UserError
from ...core.clip_preprocessing import Preprocessing
from ...core.file_readers import Loaded
from ...core.frozen import reads_weights
from ...core.settings import settings
from .lora import LoRASettings, merged_state
from .models import build_model, preset_of
from .preprocessing import preprocessing_of, preprocessing_of_training
from .shapes import resolved
from .weights import AVERAGE, below, fit, load_pretrained


def rebuild(arguments: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> CustomTextCLIP:
    """Build the evaluated network of a training, in eval mode.

    Args:
        arguments: hyperparameters of the module; `tuning.lora` describes adapters, which are merged.
        state: state dict of that network.
        source: where the state is from, for messages.

    Raises:
        UserError: If the state does not fit.
    """
    model = build_model(arguments["model"], arguments["vision"]["image_size"], arguments["max_tokens"])
    if lora := arguments.get("tuning", {}).get("lora"):
        state = merged_state(state, settings(LoRASettings, lora))
    if "logit_bias" not in state:
        model.logit_bias = None
    model.load_state_dict(fit(model, state, source))
    return model.eval()


def network_of_training(content: Mapping[str, Any], source: str) -> tuple[CustomTextCLIP, str]:
    """Return the evaluated network of a checkpoint: the moving average if there is one, else the student.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.

    Returns:
        The network, and "average" or "student".

    Raises:
        UserError: If the checkpoint is of another class, or does not fit its own arguments.
    """
    state, arguments = content["state_dict"], content["hyper_parameters"]
    kind = "average" if any(key.startswith(AVERAGE) for key in state) else "student"
    missing = [name for name in ("model", "vision", "max_tokens") if name not in arguments]
    if missing:
        raise UserError(
            f"Expected the hyper_parameters of MobileCLIPModule or CLIPModule, found no {' and no '.join(missing)} "
            f"among the hyper_parameters of {source}: it is of another class, or of another version of vlightning."
        )
    return rebuild(arguments, below(f"{kind}.", state), source), kind


def read_published(name: str, path: Path) -> Loaded | None:
    """Read a pair of towers for `load_published`: the vendor's, open_clip's, or a checkpoint of this package.

    Args:
        name: as in `build_model`, no fields.
        path: as in `load_weights`.

    Returns:
        The network; None for a captioner, which open_clip loads by itself.

    Raises:
        UserError: If the file is of another model or cannot be read.
    """
    own = preset_of(name) is not None
    if not own and "multimodal_cfg" in (open_clip.get_model_config(name) or {}):
        return None
    if reads_weights():
        network, preprocessing = _read_training(name, path) or load_pretrained(name, path)
    else:
        network, preprocessing = build_model(name, context_length=None), preprocessing_of(name)
    # MobileCLIP's models have open_clip's default tokenizer; open_clip does not know all of their names.
    tokenizer = open_clip.get_tokenizer("" if own else name, network.context_length)
    return Loaded(network, preprocessing, tokenizer)


def _read_training(name: str, path: Path) -> tuple[CustomTextCLIP, Preprocessing] | None:
    """Return network and preprocessing of a checkpoint of this package; None if the file is something else."""
    if not path.is_dir() and path.suffix != ".ckpt":
        return None
    content = AtomicCheckpointIO().load_checkpoint(path)
    arguments = content.get("hyper_parameters", {})
    if "model" not in arguments:
        return None
    if (found := resolved(arguments["model"])) != resolved(name):
        raise UserError(f"Expected a training of {name} in {str(path)!r}, got one of {found}: correct it.")
    network, _ = network_of_training(content, str(path))
    return network, Preprocessing.of(preprocessing_of_training(content), repr(str(path)))
