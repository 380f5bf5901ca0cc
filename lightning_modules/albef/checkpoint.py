"""The authors' checkpoint layout: which of their keys holds which of our tensors, and what may differ.

Their files come in two families. Pre-training has `text_encoder.bert.*` and the language-model head
`text_encoder.cls.*`; retrieval drops the level `bert.` and the head, and adds the images' ids of the queues,
`idx_queue`. The teacher's keys carry `_m`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...callbacks import AtomicCheckpointIO
from ...callbacks.queue import NO_ID
from ..base.fitting import load_fitting
from ..networks.vit_weights import resize_positions

if TYPE_CHECKING:
    from .module import ALBEFModule

QUEUES = ("image_queue", "text_queue")
_PARTS = ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
_POSITION_IDS = "bert.embeddings.position_ids"
_HEAD = ".text_encoder.cls."
_NO_ID = -100  # theirs


def to_official(module: "ALBEFModule") -> dict[str, Tensor]:
    """Return the module's state under the authors' keys: at the paper's sizes 844 entries with the language-model head.

    With the head (`mlm=True`) it is their pre-training layout, without it their retrieval layout. Their queues are
    feature-major [E, Q] and share one pointer and one row of ids: the pointer is the image queue's, and a slot whose
    two keys are of different images has no id. A slot that is not filled yet is a column of zeros.
    """
    state = module.state_dict()
    flat = not module.hparams["mlm"]
    official = {
        _official_name(own, flat): tensor
        for own, tensor in state.items()
        if not own.startswith(("temperature", *QUEUES))
    }
    positions = module.student.text_encoder.bert.embeddings.position_ids
    official |= {
        _official_name(f"{root}.text_encoder.{_POSITION_IDS}", flat): positions for root in ("student", "teacher")
    }
    official |= {
        "temp": state["temperature"].squeeze(0),
        "image_queue": state["image_queue.features"].T,
        "text_queue": state["text_queue.features"].T,
        "queue_ptr": state["image_queue.pointer"].reshape(1),
    }
    if flat:
        image_ids, text_ids = (state[f"{name}.ids"] for name in QUEUES)
        # Older checkpoints of ours have -1 in empty slots.
        filled = torch.arange(len(image_ids), device=image_ids.device) < state["image_queue.filled"]
        known = (image_ids == text_ids) & (image_ids != NO_ID) & filled
        official["idx_queue"] = torch.where(known, image_ids, _NO_ID)[None]
    return official


def save_official(module: "ALBEFModule", path: str | Path) -> None:
    """Write `to_official` to a file that the authors' scripts load with `--checkpoint`.

    Raises:
        OSError: if it cannot be written; a file that was there before is then unchanged.
    """
    AtomicCheckpointIO().save_checkpoint({"model": to_official(module)}, path)


def load_official(
    module: "ALBEFModule",
    official: Mapping[str, Tensor],
    queues: bool = True,
    source: str = "a state dict of the authors",
) -> str:
    """Load a state dict in the authors' layout, of either family, strictly.

    Args:
        module: what to fill.
        official: their state dict.
        queues: whether the queues are restored too, which belong to these weights: keys of another model are wrong
            negatives. A slot counts as filled up to the last column that is not zero; the authors' are always full.
        source: where it is from, for messages.

    Returns:
        What was done and what was left out, for a log line.

    Raises:
        ValueError: if a key is missing, unknown or of another shape; the sentence lists them. Nothing is loaded then.
    """
    flat = any(name.startswith("text_encoder.embeddings.") for name in official)
    return load_own(module, _own_state(official), source, queues, partial(_official_name, flat=flat))


def load_own(
    module: "ALBEFModule", state: Mapping[str, Tensor], source: str, queues: bool, say: Callable[[str], str] = str
) -> str:
    """Load a state under our own names, strictly, apart from what a training may start without.

    A file without a teacher starts it as the student's copy. Position tables are resized to the module's grid. A
    language-model head that the module lacks is left out, and so are queues of another size.

    Args:
        module: what to fill.
        state: its state, tied weights once or twice.
        source: where it is from, for messages.
        queues: whether the queues are restored too.
        say: gives the name that the source has for one of ours.

    Returns:
        What was done and what was left out, for a log line.

    Raises:
        ValueError: if the rest does not fit; the sentence lists the keys. Nothing is loaded then.
    """
    own = module.state_dict()
    state, notes = dict(state), []

    heads = [name for name in state if _HEAD in name]
    if module.hparams["mlm"] and not heads and any(".text_encoder." in name for name in state):
        raise ValueError(
            f"Found no language-model head in {source}, expected one: set the model's mlm to false, as fine-tuning for "
            "retrieval does, or start from pre-training weights."
        )
    if heads and not module.hparams["mlm"]:
        state = {name: tensor for name, tensor in state.items() if name not in heads}
        notes.append("without its language-model head")

    if not any(name.startswith("teacher.") for name in state):
        state |= {f"teacher.{name[8:]}": tensor for name, tensor in state.items() if name.startswith("student.")}
        notes.append("the teacher as the student's copy")

    for alias, name in tied_names(own).items():
        if name in state and not torch.equal(state.setdefault(alias, state[name]), state[name]):
            raise ValueError(
                f"Found different values of {say(name)} and {say(alias)} in {source}, which are one tensor in ALBEF: "
                "it is damaged, or of another model."
            )

    resized = _resize_positions(module, state)
    if resized:
        notes.append(resized)

    held = {name for name in state if name in own and name.startswith(QUEUES)}
    fit = all(len(state[name]) == len(own[name]) for name in held if name.endswith(".features"))
    if held and not (queues and fit):
        notes.append("without its queues" + (", which have another size" if queues else ""))
        state = {name: tensor for name, tensor in state.items() if name not in held}
    if not (queues and fit):
        state |= {name: tensor for name, tensor in own.items() if name.startswith(QUEUES)}

    load_fitting(module, state, f"ALBEF from {source}", say)
    return ", ".join([source, *notes])


def tied_names(names: Mapping[str, Tensor]) -> dict[str, str]:
    """Of two of our names for one tensor, the one that can be left out, and the one that stays."""
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


def _resize_positions(module: "ALBEFModule", state: dict[str, Tensor]) -> str:
    """Resize the position tables of student and teacher in place; what was done, or nothing."""
    grid = module.student.visual_encoder.patch_embed.grid_size
    done = ""
    for name in ("student.visual_encoder.pos_embed", "teacher.visual_encoder.pos_embed"):
        table = state.get(name)
        if table is None or table.dim() != 3 or table.shape[1] == 1 + grid[0] * grid[1]:
            continue
        patches = table.shape[1] - 1
        if math.isqrt(patches) ** 2 == patches:  # else it is listed as misshapen
            state[name] = resize_positions(table, grid)
            done = f"positions resized from {patches} to {grid[0] * grid[1]} patches"
    return done


def _official_name(own: str, flat: bool) -> str:
    """The authors' name of one of our tensors; `flat` without the level `bert.`."""
    root, _, rest = own.partition(".")
    if root in ("student", "teacher"):
        part, _, name = rest.partition(".")
        return f"{part}{'_m' if root == 'teacher' else ''}.{name.removeprefix('bert.') if flat else name}"
    if root in QUEUES:
        return "queue_ptr" if rest == "pointer" else root
    return "temp" if own == "temperature" else own


def _own_state(official: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' state dict under our names; what has no name of ours keeps its own."""
    state: dict[str, Tensor] = {}
    for name, tensor in official.items():
        part, _, rest = name.partition(".")
        root = "teacher" if part.endswith("_m") else "student"
        part = part.removesuffix("_m")
        if part == "text_encoder" and rest.startswith(("embeddings.", "encoder.")):
            rest = f"bert.{rest}"
        if rest == _POSITION_IDS:  # 0, 1, 2, ...: transformers made them non-persistent, so later files lack them
            continue
        own = f"{root}.{part}.{rest}" if part in _PARTS else name
        state[name if own in state else own] = tensor  # with and without `bert.` in one file is one too many

    if "temp" in state:
        state["temperature"] = state.pop("temp").reshape(1)
    pointer, ids = state.pop("queue_ptr", None), state.pop("idx_queue", None)
    for queue in QUEUES:
        if queue in state:
            features = state.pop(queue).T
            filled = features.any(1) * torch.arange(1, 1 + len(features), device=features.device)
            state[f"{queue}.features"] = features
            state[f"{queue}.filled"] = filled.max()
            state[f"{queue}.ids"] = torch.full((len(features),), NO_ID)
        if ids is not None:
            state[f"{queue}.ids"] = torch.where(ids == _NO_ID, NO_ID, ids).flatten()
        if pointer is not None:
            state[f"{queue}.pointer"] = pointer.reshape(())
    return state
