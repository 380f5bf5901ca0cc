"""Initial weights of ALBEF: from a trained ALBEF, from public models, and from state dicts of both layouts."""

import math
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from transformers import BertForMaskedLM

from ...common.errors import UserError
from ..core.checkpoints import read_folder
from ..core.fitting import fill_tied, load_fitting
from ..networks.vit import load_vision_weights, resize_positions
from .network import FusionBert
from .official import QUEUES, from_official, is_flat, official_name
from .teacher import copy_student

if TYPE_CHECKING:
    from .module import ALBEFModule

_HEAD = ".text_encoder.cls."


def check_sources(module: "ALBEFModule") -> None:
    """Check that the settings name one source of weights.

    Raises:
        UserError: If a trained ALBEF is named beside weights of a part.
    """
    parts = module.vision.weights, module.text.weights
    if module.weights is not None and parts != (None, None):
        raise UserError(
            f"Expected one source of weights, got model.weights {module.weights!r} beside vision.weights {parts[0]!r} "
            f"and text.weights {parts[1]!r}: set the latter to null."
        )


def start(module: "ALBEFModule") -> None:
    """Load initial weights into student and teacher, and log their sources.

    `weights` is a trained ALBEF. Otherwise `vision.weights` and `text.weights` initialize parts of the student, and the
    teacher is its copy.
    """
    if module.weights is not None:
        rank_zero_info(f"ALBEF starts with {load_trained(module, module.weights)}.")
        return
    vision, text = "image encoder at random", "text and fusion encoder at random"
    if module.vision.weights is not None:
        vision = load_vision_weights(module.student.visual_encoder, module.vision.weights)
    if module.text.weights is not None:
        text = load_bert(module.student.text_encoder, module.text.weights)
    copy_student(module.student, module.teacher)
    rank_zero_info(f"ALBEF starts with {vision}; {text}; projections and matching head at random.")


def load_bert(encoder: FusionBert, source: str) -> str:
    """Fill text layers, fusion layers and language-model head from a BERT; cross-attention stays random (section 3.1).

    Args:
        encoder: the BERT to fill.
        source: hub name or folder of a BERT with a masked-language-model head, for example "bert-base-uncased".

    Returns:
        Description of the source, for a log line.

    Raises:
        UserError: If the source is not a BERT of this size; the message lists the keys that do not fit.
    """
    state = BertForMaskedLM.from_pretrained(source).state_dict()
    cross_attention = {key: value for key, value in encoder.state_dict().items() if ".crossattention." in key}
    # The lowest layers of a deeper BERT initialize the text encoder, and the next layers the fusion encoder.
    state = {key: value for key, value in state.items() if _layer_of(key) < len(encoder.layers)}
    load_fitting(encoder, state | cross_attention, f"the text encoder from {source!r}")
    return f"text and fusion encoder from {source!r}, cross-attention random"


def load_trained(module: "ALBEFModule", source: str) -> str:
    """Fill student and teacher from a trained ALBEF, without its queues: keys of another model are wrong negatives.

    Args:
        module: module to fill.
        source: checkpoint of the authors or of this class, or the folder of an export.

    Returns:
        Description of what was loaded and what was not, for a log line.

    Raises:
        UserError: If the source does not exist, is of another kind, or does not fit. Nothing is loaded then.
    """
    state, name, name_in_source = read_trained(source)
    return load_state(module, state, name, queues=False, name_in_source=name_in_source)


def read_trained(source: str) -> tuple[dict[str, Tensor], str, Callable[[str], str]]:
    """Read a trained model of ALBEF's family.

    Args:
        source: checkpoint of the authors or of this package, or the folder of an export.

    Returns:
        The state under the names of this package, a description of the source, and a function from these names to the
        source's, both for messages.

    Raises:
        UserError: If the source does not exist, or is of another kind.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return read_folder(path)[1], f"the export {source!r}", str
    if not path.exists():
        raise UserError(
            "Expected a checkpoint of the authors or of this package, or the folder of an export, got no file or "
            f"folder {source!r}: correct model.weights."
        )
    content = _read_file(path)
    if "state_dict" in content:
        return _tensors(content["state_dict"], source), f"the checkpoint {source!r}", str
    official = _tensors(content.get("model", content), source)
    name_in_source = partial(official_name, flat=is_flat(official))
    return from_official(official), f"the authors' checkpoint {source!r}", name_in_source


def load_official(
    module: "ALBEFModule",
    official: Mapping[str, Tensor],
    queues: bool = True,
    source: str = "a state dict of the authors",
) -> str:
    """Load a state dict in the authors' layout, of either family; as `load_state`."""
    name_in_source = partial(official_name, flat=is_flat(official))
    return load_state(module, from_official(official), source, queues, name_in_source)


def load_state(
    module: "ALBEFModule",
    state: Mapping[str, Tensor],
    source: str,
    queues: bool,
    name_in_source: Callable[[str], str] = str,
) -> str:
    """Load a state dict with the names of this package, strictly except for optional parts.

    Without a teacher in the source, the teacher becomes a copy of the student. Position tables are resized to the
    module's grid. A language-model head that the module lacks and queues of another size are not loaded.

    Args:
        module: module to fill.
        state: state dict, with tied weights once or twice.
        source: description of the source, for messages.
        queues: whether to load the queues too, whose keys belong to these weights.
        name_in_source: maps a name of this package to the source's, for messages.

    Returns:
        Description of what was loaded and what was not, for a log line.

    Raises:
        UserError: If the rest does not fit; the message lists the keys. Nothing is loaded then.
    """
    own = module.state_dict()
    state, notes = dict(state), []

    heads = [name for name in state if _HEAD in name]
    if module.mlm and not heads and any(".text_encoder." in name for name in state):
        raise UserError(
            f"Expected a language-model head in {source}, got none: set model.mlm to false, as fine-tuning for "
            "retrieval does, or start from pre-training weights."
        )
    if heads and not module.mlm:
        state = {name: tensor for name, tensor in state.items() if name not in heads}
        notes.append("without its language-model head")

    if not any(name.startswith("teacher.") for name in state):
        state |= {f"teacher.{name[8:]}": tensor for name, tensor in state.items() if name.startswith("student.")}
        notes.append("the teacher as the student's copy")

    fill_tied(state, tied_names(own), source, name_in_source)

    resized = resize_position_tables(module.student.visual_encoder, state)
    if resized:
        notes.append(resized)

    held = {name for name in state if name in own and name.startswith(QUEUES)}
    fit = all(len(state[name]) == len(own[name]) for name in held if name.endswith(".features"))
    for name, queue in module.queues().items():  # an older file has no ids of texts
        if (ids := f"{name}_queue.ids") in held:
            state[ids] = queue.fitting_ids(state[ids])
    if held and not (queues and fit):
        notes.append("without its queues" + (", which have another size" if queues else ""))
        state = {name: tensor for name, tensor in state.items() if name not in held}
    if not (queues and fit):
        state |= {name: tensor for name, tensor in own.items() if name.startswith(QUEUES)}

    load_fitting(module, state, f"ALBEF from {source}", name_in_source)
    return ", ".join([source, *notes])


def tied_names(names: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the redundant name of each tied tensor, mapped to the other name."""
    tied = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    pairs = {
        f"{root}.text_encoder.{alias}": f"{root}.text_encoder.{name}"
        for root in ("student", "teacher")
        for alias, name in tied.items()
    }
    return {alias: name for alias, name in pairs.items() if alias in names}


def _layer_of(key: str) -> int:
    """Return the index of the layer that a key of a BERT belongs to, else -1."""
    parts = key.split(".")
    return int(parts[parts.index("layer") + 1]) if "layer" in parts else -1


def resize_position_tables(encoder: VisionTransformer, state: dict[str, Tensor]) -> str:
    """Resize position tables to the encoder's grid, in place; return a note for the log, or an empty string."""
    grid = encoder.patch_embed.grid_size
    done = ""
    for name in ("student.visual_encoder.pos_embed", "teacher.visual_encoder.pos_embed"):
        table = state.get(name)
        if table is None or table.dim() != 3 or table.shape[1] == 1 + grid[0] * grid[1]:
            continue
        patches = table.shape[1] - 1
        if math.isqrt(patches) ** 2 == patches:  # else `load_fitting` reports its shape
            state[name] = resize_positions(table, grid)
            done = f"positions resized from {patches} to {grid[0] * grid[1]} patches"
    return done


def _read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file of `torch.save`, tensors and plain data only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise UserError(
                f"Expected tensors and plain data in {str(path)!r}, got {foreign[1]}: if you trust its origin, load "
                "it with torch.load(..., weights_only=False) and save its entry 'model' alone."
            ) from error
        raise UserError(
            f"Expected a file of torch.save in {str(path)!r}, got a damaged file or another format: get it again."
        ) from error
    return content if isinstance(content, dict) else {}


def _tensors(state: Any, source: str) -> dict[str, Tensor]:
    """Return a state dict, after a check of its type."""
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"Expected a state dict, or one under 'model' or 'state_dict', in {source!r}, got neither: give a "
            "checkpoint of the authors or of this package."
        )
    return state
