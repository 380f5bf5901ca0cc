"""Initial weights of ALBEF: from a trained ALBEF, from public models, and from state dicts of both layouts."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from ...callbacks import FeatureQueue
from ...common.errors import UserError
from ..core.checkpoints import read_folder
from ..core.fitting import fill_tied, load_fitting
from ..networks.classifier_files import read_pickle
from ..networks.clip.pair import PRETRAINED
from ..networks.clip.text_encoder import quiet, reading_encoder
from ..networks.initial import init_linear
from ..networks.vit import load_vision_weights, resize_positions
from .network import ALBEFNetwork, FusionBert
from .official import ACCURACIES, QUEUES, TRAINING_STATE, from_official, is_flat, official_name
from .settings import TextSettings, VisionSettings

_HEAD = ".text_encoder.cls."
_BERT_NAMES = {
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
}
"""Settings by the names that `config.json` has for them."""
_TIED = {
    ".cls.predictions.decoder.weight": ".bert.embeddings.word_embeddings.weight",
    ".cls.predictions.decoder.bias": ".cls.predictions.bias",
    ".second.crossattention.self.key.": ".first.crossattention.self.key.",
    ".second.crossattention.self.value.": ".first.crossattention.self.value.",
}
"""Second and first names of tied tensors."""
_DEFAULTS = {field.name: field.default for field in fields(TextSettings)}


def check_sources(weights: str | None, vision: VisionSettings, text: TextSettings) -> None:
    """Check that the settings name one source of weights.

    Raises:
        UserError: If a trained ALBEF is named beside the weights of an encoder.
    """
    if weights is not None and (vision.weights, text.weights) != (None, None):
        raise UserError(
            f"Expected one source of weights, got model.weights {weights!r} beside vision.weights {vision.weights!r} "
            f"and text.weights {text.weights!r}: set the latter to null."
        )


# From public models


def load_encoders(student: ALBEFNetwork, vision: VisionSettings, text: TextSettings) -> str:
    """Load `vision.weights` and `text.weights` into the student's encoders.

    Returns:
        Description of the sources, for a log line; an encoder without weights stays random.

    Raises:
        UserError: If a source does not exist or does not fit.
    """
    image_source = "image encoder at random"
    text_source = "text and fusion encoder at random"
    if vision.weights is not None:
        named = vision.name if vision.name is not None and vision.weights == PRETRAINED else vision.weights
        image_source = load_vision_weights(student.visual_encoder, named)
    if text.weights is not None:
        text_source = load_bert(student.text_encoder, text.weights)
    return f"{image_source}; {text_source}; projections and matching head at random"


def load_bert(encoder: FusionBert, source: str) -> str:
    """Fill text layers, fusion layers and language-model head from a BERT; cross-attention stays random (section 3.1).

    Args:
        encoder: the BERT to fill.
        source: hub name or folder of a BERT, for example "bert-base-uncased"; of one without a masked-language-model
            head, such as MiniLM, that head stays random.

    Returns:
        Description of the source, for a log line.

    Raises:
        UserError: If there is no such source, or it is not a BERT of this size; the message lists the keys that do not
            fit.
    """
    with reading_encoder(source) as folder_or_name, quiet():
        bert, report = BertForMaskedLM.from_pretrained(folder_or_name, output_loading_info=True)
    for name, module in encoder.named_modules():
        if ".crossattention." in name:  # as random layers of a BERT are
            init_linear(module, bert.config.initializer_range)
    own = encoder.state_dict()
    # The head's output is tied to the words, which every BERT has.
    random = [
        key for key in report["missing_keys"] if key in own and "cls." in key and not key.endswith("decoder.weight")
    ]
    state = bert.state_dict() | {key: own[key] for key in random}
    cross_attention = {key: value for key, value in own.items() if ".crossattention." in key}
    # The lowest layers of a deeper BERT initialize the text encoder, and the next layers the fusion encoder.
    state = {key: value for key, value in state.items() if _layer_of(key) < len(encoder.layers)}
    load_fitting(encoder, state | cross_attention, f"the text encoder from {source!r}")
    head = " and language-model head" if random else ""
    return f"text and fusion encoder from {source!r}, cross-attention{head} random"


def _layer_of(key: str) -> int:
    """Return the index of the layer that a key of a BERT belongs to, else -1."""
    match = re.search(r"\.layer\.(\d+)\.", key)
    return int(match[1]) if match else -1


def sizes_of_bert(text: TextSettings) -> dict[str, int]:
    """Return the settings that follow from the BERT whose folder `weights` names; none for other weights.

    Width, heads, feed-forward width, positions and vocabulary are those of `config.json`, special token ids those of
    the folder's tokenizer. Its layers are split: `depth` is what `fusion_depth` leaves, which is half of the layers
    unless it is set. If `depth` is set, the first `depth + fusion_depth` layers are used. A setting counts as set if it
    differs from its default.

    Raises:
        UserError: If the folder holds no BERT, or a setting does not fit it.
    """
    folder = Path(text.weights or "").expanduser()
    if text.weights is None or not folder.is_dir():
        return {}
    config = _bert_config(folder)
    sizes = {name: getattr(config, bert_name) for name, bert_name in _BERT_NAMES.items()}
    for name, size in sizes.items():
        setting = getattr(text, name)
        # The command line sets the vocabulary from the data, whose tokenizer may have fewer entries.
        if name != "vocab_size" and setting not in (_DEFAULTS[name], size):
            raise UserError(
                f"Expected text.{name} {size}, that of the BERT in {str(folder)!r}, got {setting}: leave it out, "
                "also of the configs."
            )
    return sizes | _layers(text, config.num_hidden_layers, folder) | _special_ids(text, folder)


def _bert_config(folder: Path) -> BertConfig:
    """Return the configuration of the BERT in a folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"Expected a BERT as text.weights, got {str(folder)!r} without config.json: correct it.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Expected JSON in {str(file)!r}, got another format or a damaged file: correct it.") from error
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if model_type != "bert":
        raise UserError(f"Expected a BERT as text.weights, got {model_type!r} in {str(file)!r}: give another folder.")
    return BertConfig.from_dict(content)


def _layers(text: TextSettings, layers: int, folder: Path) -> dict[str, int]:
    """Return the numbers of text and fusion layers."""
    depth = text.depth
    fusion_depth = text.fusion_depth
    if depth != _DEFAULTS["depth"]:
        if depth + fusion_depth > layers:
            raise UserError(
                f"Expected text.depth and text.fusion_depth of at most {layers} together, the layers of the BERT in "
                f"{str(folder)!r}, got {depth} and {fusion_depth}: decrease one of them."
            )
        return {}
    if fusion_depth == _DEFAULTS["fusion_depth"]:
        fusion_depth = layers // 2
    if not 1 <= fusion_depth < layers:
        raise UserError(
            f"Expected text.fusion_depth from 1 to {layers - 1}, below the layers of the BERT in {str(folder)!r}, got "
            f"{fusion_depth}: correct it, or give a deeper BERT."
        )
    return {"depth": layers - fusion_depth, "fusion_depth": fusion_depth}


def _special_ids(text: TextSettings, folder: Path) -> dict[str, int]:
    """Return the special token ids of the folder's tokenizer; none without a tokenizer."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in text.special_token_ids}
    return {name: number for name, number in ids.items() if number is not None}


# From a trained ALBEF


def read_trained(source: str, depth: int) -> tuple[dict[str, Tensor], str, Callable[[str], str]]:
    """Read a trained model of ALBEF's family.

    Args:
        source: checkpoint of the authors or of this package, or the folder of an export.
        depth: number of text layers of the module that is filled.

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
    content = read_pickle(path)
    if "state_dict" in content:
        return _tensors(content["state_dict"], source), f"the checkpoint {source!r}", str
    official = _tensors(content.get("model", content), source)
    name_in_source = partial(official_name, flat=is_flat(official), depth=depth)
    return from_official(official), f"the authors' checkpoint {source!r}", name_in_source


def load_state(
    module: Any,
    state: Mapping[str, Tensor],
    source: str,
    queues: bool,
    name_in_source: Callable[[str], str] = str,
) -> str:
    """Load a state dict into an `ALBEFModule`, as `load_networks`.

    A language-model head that the module lacks, queues of another size and running accuracies are not loaded.

    Args:
        module: an `ALBEFModule`.
        state: state dict with the names of this package.
        source: description of the source, for messages.
        queues: whether to load the queues too, whose keys belong to these weights.
        name_in_source: maps a name of this package to the source's, for messages.

    Returns:
        Description of what was loaded and what was not, for a log line.

    Raises:
        UserError: If the other tensors do not fit; the message lists the keys. Nothing is loaded then.
    """
    module_state = module.state_dict()
    state = dict(state)
    notes = []

    has_head = any(_HEAD in name for name in state)
    if module.mlm and not has_head and any(".text_encoder." in name for name in state):
        raise UserError(
            f"Expected a language-model head in {source}, got none: set model.mlm to false, as fine-tuning for "
            "retrieval does, or start from pre-training weights."
        )
    if has_head and not module.mlm:
        state = {name: tensor for name, tensor in state.items() if _HEAD not in name}
        notes.append("without its language-model head")

    saved_queues = {name for name in state if name in module_state and name.startswith(QUEUES)}
    fits = all(len(state[name]) == len(module_state[name]) for name in saved_queues if name.endswith(".features"))
    if saved_queues and not (queues and fits):
        notes.append("without its queues" + (", which have another size" if queues else ""))
        state = {name: tensor for name, tensor in state.items() if name not in saved_queues}
    state = {name: tensor for name, tensor in state.items() if not name.startswith(ACCURACIES)}
    kept = ACCURACIES if queues and fits else TRAINING_STATE
    state |= {name: tensor for name, tensor in module_state.items() if name.startswith(kept)}
    for name, queue in module.named_children():  # the authors' files have ids of images only
        if isinstance(queue, FeatureQueue) and f"{name}.ids" in state:
            state[f"{name}.ids"] = queue.fitting_ids(state[f"{name}.ids"])
    notes += load_networks(module, state, source, name_in_source=name_in_source)
    return ", ".join([source, *notes])


def load_networks(
    module: Any,
    state: Mapping[str, Tensor],
    source: str,
    new: Sequence[str] = (),
    teacher_start: Literal["weights", "random"] = "weights",
    name_in_source: Callable[[str], str] = str,
) -> list[str]:
    """Load a state dict with the names of this package, strictly except for optional tensors.

    Without a teacher in the source, the teacher becomes a copy of the student. Position tables are resized to the
    module's grid.

    Args:
        module: module to fill, with the networks `student` and `teacher` (None without distillation).
        state: state dict, with tied weights once or twice.
        source: description of the source, for messages.
        new: prefixes of a network's tensors, such as "cls_head.", that may be missing and then start at random.
        teacher_start: as in `TaskMomentumSettings`.
        name_in_source: maps a name of this package to the source's, for messages.

    Returns:
        Notes for a log line on what differs from the source.

    Raises:
        UserError: If the other tensors do not fit; the message lists the keys. Nothing is loaded then.
    """
    module_state = module.state_dict()
    state = dict(state)
    notes = []

    random = _missing("student.", new, state)
    if random:
        notes.append(f"{', '.join(prefix.rstrip('.') for prefix in random)} at random")
        names = tuple(f"student.{prefix}" for prefix in random)
        state |= {name: tensor for name, tensor in module_state.items() if name.startswith(names)}
    has_teacher = any(name.startswith("teacher.") for name in state)
    random_teacher = not has_teacher and teacher_start == "random"
    if module.teacher is not None:
        copied = tuple(f"student.{prefix}" for prefix in _missing("teacher.", new if has_teacher else [""], state))
        state |= {f"teacher.{name[8:]}": tensor for name, tensor in state.items() if name.startswith(copied)}
        if not has_teacher:
            notes.append("the teacher at random" if random_teacher else "the teacher as the student's copy")

    fill_tied(state, tied_names(module_state), source, "the model", name_in_source)
    if resized := resize_position_tables(state, module_state):
        notes.append(resized)
    if random_teacher:
        # The authors copy the random student before they load the weights, and average before the first pass.
        weight = 1 - module.momentum.momentum
        state |= {
            name: torch.lerp(tensor, state[f"student.{name[8:]}"], weight)
            for name, tensor in module_state.items()
            if name.startswith("teacher.")
        }
    load_fitting(module, state, f"{type(module).__name__} from {source}", name_in_source)
    return notes


def _missing(network: str, prefixes: Sequence[str], state: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes of a network's tensors of which a state dict has none."""
    return [prefix for prefix in prefixes if not any(name.startswith(f"{network}{prefix}") for name in state)]


def tied_names(names: Iterable[str]) -> dict[str, str]:
    """Return the second name of each tied tensor, mapped to the first.

    A language-model head shares the words and its bias, and the halves of a doubled layer share projections.
    """
    return {name: name.replace(second, first) for name in names for second, first in _TIED.items() if second in name}


def without_tied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict without second names of tied tensors, which safetensors refuses."""
    second_names = tied_names(state)
    return {name: tensor for name, tensor in state.items() if name not in second_names}


def resize_position_tables(state: dict[str, Tensor], module_state: Mapping[str, Tensor]) -> str:
    """Resize the image encoders' position tables of a state dict to those of a module, in place.

    Returns:
        A note for the log; empty if no table was resized.
    """
    note = ""
    for name in ("student.visual_encoder.pos_embed", "teacher.visual_encoder.pos_embed"):
        table = state.get(name)
        if table is None or name not in module_state or table.dim() != 3:
            continue
        patches = table.shape[1] - 1  # a position each, and one for CLS
        expected = module_state[name].shape[1] - 1
        if patches != expected and math.isqrt(patches) ** 2 == patches:  # else `load_fitting` reports its shape
            side = math.isqrt(expected)  # images are square
            state[name] = resize_positions(table, (side, side))
            note = f"positions resized from {patches} to {expected} patches"
    return note


def _tensors(state: Any, source: str) -> dict[str, Tensor]:
    """Return a state dict, after a check of its type."""
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"Expected a state dict, or one under 'model' or 'state_dict', in {source!r}, got neither: give a "
            "checkpoint of the authors or of this package."
        )
    return state
