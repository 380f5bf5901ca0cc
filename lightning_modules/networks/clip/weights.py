"""Trained weights of image-text models, read from files of the vendor, of open_clip or of this package.

`load_weights` fills a network, `load_pretrained` builds it too, and `network_of_training` rebuilds the network of a
checkpoint of this package.
"""

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from open_clip import CustomTextCLIP
from open_clip.model import convert_to_custom_text_state_dict
from open_clip.transformer import VisionTransformer as OpenClipViT
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models import VisionTransformer as TimmViT
from torch import Tensor, nn

from ....callbacks import AtomicCheckpointIO
from ....callbacks.checkpoints.sharded_checkpoint import METADATA
from ....common.errors import UserError
from ....common.preprocessing import Preprocessing
from ...core.fitting import misfits
from ...core.settings import settings
from .files import WEIGHTS_NAME
from .lora import LoRASettings, merged_state
from .models import build_model
from .preprocessing import preprocessing_of
from .shapes import Model
from .vendor_layout import from_vendor, is_vit, vendor_name

LongerTexts = Literal["stretched", "interpolated"]
KEPT_POSITIONS = 20
"""Number of first positions that stretching keeps, those of most of CLIP's training texts (Long-CLIP)."""
_LONGER = ", or model.longer_texts to stretched"
_POSITIONS = "text.positional_embedding"
STUDENT = "student."
AVERAGE = "average."
"""Prefixes of the two networks of a training in its state dict."""
_WRAPPED = "module."
# timm's image towers have a bias that the vendor's lack; SigLIP has a logit bias that students trained here lack.
_ZERO_IF_MISSING = ("visual.trunk.head.fc.bias", "visual.trunk.head.bias", "logit_bias")


class Pretrained(NamedTuple):
    """A trained model in eval mode, and its preprocessing."""

    model: CustomTextCLIP
    preprocessing: Preprocessing


def load_pretrained(
    name: Model, path: str | Path, image_size: int | None = None, context_length: int | None = None
) -> Pretrained:
    """Build a model and load trained weights.

    The name of one of open_clip's models implies its activation, which files do not: OpenAI's weights are of names that
    end in `-quickgelu`.

    Args:
        name: as in `build_model`.
        path: as in `load_weights`.
        image_size: side of the images in pixels; None means the model's own.
        context_length: number of tokens in a text; None means the model's own.

    Raises:
        UserError: If there is no such model or file, or the weights are of another model or cannot be read.
    """
    model = build_model(name, image_size, context_length)
    rank_zero_info(load_weights(model, name, path))
    return Pretrained(model.eval(), preprocessing_of(name, image_size))


def load_weights(model: CustomTextCLIP, name: Model, path: str | Path, longer_texts: LongerTexts | None = None) -> str:
    """Load trained weights into a model, all of them or none.

    Args:
        model: the network to fill.
        name: its name, for messages.
        path: a file of `torch.save` or `.safetensors`, in the vendor's or open_clip's layout, or a checkpoint of a
            training here, whose moving average is preferred to its student.
        longer_texts: as in `load_state`.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If there is no such file, it cannot be read, or it is of another model.
    """
    source = repr(str(path))
    state, kind = _read(Path(path).expanduser(), source)
    if any(key.startswith("image_encoder.") for key in state):
        reported = partial(vendor_name, vit=is_vit(model.state_dict()))
        return load_state(
            model, name, from_vendor(model, state), source, "the vendor's checkpoint", reported, longer_texts
        )
    return load_state(model, name, state, source, kind, longer_texts=longer_texts)


def load_state(
    model: CustomTextCLIP,
    name: Model,
    state: dict[str, Tensor],
    source: str,
    kind: str,
    reported: Callable[[str], str | None] = str,
    longer_texts: LongerTexts | None = None,
) -> str:
    """Load a state dict into a model, with positions resampled for its image size.

    Args:
        model: the network to fill.
        name: its name, for messages.
        state: weights under the model's names.
        source: where they are from, for messages.
        kind: what that is, for the log.
        reported: returns the source's name for one of the model's.
        longer_texts: how the positions of a text tower become more, as in `more_positions`; None refuses that.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If the weights are of another model.
    """
    if model.logit_bias is None:
        state.pop("logit_bias", None)  # SigLIP's; no feature depends on it
    notes = _resize_positions(model, state)
    if longer_texts is not None:
        notes += _lengthen_positions(model, state, longer_texts)
    fitted = fit(model, state, source, reported)
    notes += [f"with zeros for the missing {key}" for key in fitted.keys() - state.keys()]
    model.load_state_dict(fitted)
    return f"{name} starts with {kind} {source}{''.join(f', {note}' for note in notes)}."


def fit(
    model: nn.Module, state: Mapping[str, Tensor], source: str, reported: Callable[[str], str | None] = str
) -> dict[str, Tensor]:
    """Return a state dict with exactly the model's names and shapes.

    Only the biases of an image projection and of the logits may be missing, which become zero; a scalar may be of shape
    [] or [1].

    Args:
        model: the network to fill.
        state: the weights under the model's names.
        source: where they are from, for messages.
        reported: returns the source's name for one of the model's.

    Raises:
        UserError: If weights are missing, unexpected, or of another shape.
    """
    fitted = dict(state)
    missing = []
    wrong = []
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in fitted and name in _ZERO_IF_MISSING:
            fitted[name] = torch.zeros_like(tensor)
        elif name not in fitted:
            missing.append(str(reported(name)))
        elif fitted[name].numel() == tensor.numel() == 1:
            fitted[name] = fitted[name].reshape(tensor.shape)
        elif fitted[name].shape != tensor.shape:
            wrong.append(f"{reported(name)} {list(fitted[name].shape)} instead of {list(tensor.shape)}")
    unexpected = sorted(fitted.keys() - expected.keys())
    if len(wrong) == 1 and not missing and not unexpected and "text.positional_embedding" in expected:
        length, expected_length = (len(tensors["text.positional_embedding"]) for tensors in (fitted, expected))
        if length != expected_length:
            raise UserError(
                f"Expected positions of {expected_length} tokens, got {length} in {source}: set data.max_tokens to "
                f"{length}{_LONGER * (expected_length > length)}; in Python, max_tokens of the module or "
                "context_length."
            )
    problems = misfits(missing, unexpected, wrong)
    if problems:
        raise UserError(
            f"Expected the weights of this model in {source}, got {' and '.join(problems)}: name the model that the "
            "weights are of."
        )
    return fitted


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
    state = content["state_dict"]
    arguments = content["hyper_parameters"]
    kind = "average" if any(key.startswith(AVERAGE) for key in state) else "student"
    missing = [name for name in ("model", "vision", "max_tokens") if name not in arguments]
    if missing:
        raise UserError(
            f"Expected the hyper_parameters of MobileCLIPModule or CLIPModule, found no {' and no '.join(missing)} "
            f"among the hyper_parameters of {source}: it is of another class, or of another version of vlightning."
        )
    return rebuild(arguments, below(f"{kind}.", state), source), kind


def below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state dict with a prefix, without the prefix."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _read(path: Path, source: str) -> tuple[dict[str, Tensor], str]:
    """Return a state dict and its kind, in words."""
    if path.is_dir() and not (path / METADATA).is_file():
        raise UserError(f"Expected a file, got the folder {source}: name a file in it, such as {WEIGHTS_NAME}.")
    if not path.exists():
        raise UserError(f"Expected trained weights, found no file {source}: correct the path, or download it.")
    state: Any
    try:
        state = load_file(path) if path.suffix == ".safetensors" else AtomicCheckpointIO().load_checkpoint(path)
    # Unpickling something else ends in any of these, apart from the errors that have a sentence already.
    except (SafetensorError, LookupError, UnicodeError, AssertionError, struct.error) as error:
        raise UserError(
            f"Expected a readable checkpoint, got {source}, which is damaged or of another kind ({error}): get it "
            "again."
        ) from error
    for entry in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(entry), dict):
            state = state[entry]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"Expected trained weights, found neither a state dict nor one under 'state_dict' or 'model' in {source}: "
            "correct the path."
        )
    if all(key.startswith(_WRAPPED) for key in state):
        state = below(_WRAPPED, state)
    for prefix, kind in ((AVERAGE, "the averaged weights of"), (STUDENT, "the student of")):
        if weights := below(prefix, state):
            return weights, f"{kind} the training"
    return convert_to_custom_text_state_dict(state), "the checkpoint"


def more_positions(table: Tensor, length: int, longer_texts: LongerTexts) -> Tensor:
    """Return embeddings of positions for longer texts.

    "stretched" keeps the first 20 and interpolates the others linearly (Long-CLIP, Zhang et al., arXiv 2403.15378,
    section 3.1: from 77 to 248 by the factor 4, the last three extrapolated). The features of a causal tower for texts
    of at most 20 tokens do not change. "interpolated" interpolates all, the first and the last excepted.

    Args:
        table: embeddings [N, W].
        length: number L of positions of the result, above N.
        longer_texts: which of both.

    Returns:
        Embeddings [L, W].
    """
    count = len(table)
    kept = min(KEPT_POSITIONS, count - 2) if longer_texts == "stretched" else 0
    new = torch.arange(length - kept, dtype=torch.float64, device=table.device)
    factor = (count - kept) / (length - kept) if kept else (count - 1) / (length - 1)
    places = kept + new * factor
    below_places = places.floor().long().clamp(max=count - 2)
    share = (places - below_places).to(table.dtype)[:, None]  # above 1 beyond the last position
    interpolated = table[below_places] + share * (table[below_places + 1] - table[below_places])
    return torch.cat([table[:kept], interpolated])


def _lengthen_positions(model: CustomTextCLIP, state: dict[str, Tensor], longer_texts: LongerTexts) -> list[str]:
    """Make a text tower's positions more in place, and return a note for the log."""
    table = state.get(_POSITIONS)
    expected = model.state_dict().get(_POSITIONS)
    has_class_token = getattr(model.text, "cls_emb", None) is not None  # it has the last position
    if table is None or expected is None or table.dim() != 2 or has_class_token or len(table) >= len(expected):
        return []
    state[_POSITIONS] = more_positions(table, len(expected), longer_texts)
    return [f"with {longer_texts} positions for {len(expected)} instead of {len(table)} tokens"]


def _resize_positions(model: CustomTextCLIP, state: dict[str, Tensor]) -> list[str]:
    """Resample a ViT's positions in place for the model's image size, and return a note for the log."""
    trunk = getattr(model.visual, "trunk", None)
    if isinstance(trunk, TimmViT):
        name = "visual.trunk.pos_embed"
        grid = trunk.patch_embed.grid_size
        prefix = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
    elif isinstance(model.visual, OpenClipViT):
        name = "visual.positional_embedding"
        grid = model.visual.grid_size
        prefix = 1
    else:
        return []
    table = state.get(name)
    expected = model.state_dict().get(name)
    if table is None or expected is None or table.dim() != expected.dim() or table.shape[-1] != expected.shape[-1]:
        return []
    side = math.isqrt(table.shape[-2] - prefix)
    if table.shape == expected.shape or side * side != table.shape[-2] - prefix:
        return []
    resampled = resample_abs_pos_embed(table.reshape(1, -1, table.shape[-1]), list(grid), num_prefix_tokens=prefix)
    state[name] = resampled.reshape(expected.shape)
    return [f"with positions resampled from {side}x{side} to {grid[0]}x{grid[1]}"]
