"""The checkpoint layouts of ALBEF's authors: conversion between their names and those of this package.

Pre-training has `text_encoder.bert.*` and the language-model head `text_encoder.cls.*`. Retrieval has neither the level
`bert.` nor the head, but the image ids of the queues, `idx_queue`. The other tasks have neither of these, nor queues.
Of NLVR2's 18 layers, 2(l - 6) + 6 and 2(l - 6) + 7 are the two halves of our layer l. The teacher's names carry `_m`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...callbacks import AtomicCheckpointIO
from ...callbacks.queue import NO_ID

QUEUES = ("image_queue", "text_queue")
ACCURACIES = "accuracies"
TRAINING_STATE = (*QUEUES, ACCURACIES)
"""Prefixes of what only training uses."""
_MODULES = ("visual_encoder", "text_encoder", "text_decoder", "vision_proj", "text_proj", "cls_head", "ta_head")
_POSITION_IDS = "bert.embeddings.position_ids"
_OFFICIAL_NO_ID = -100
LAYER = re.compile(r"(text_encoder\.bert\.encoder\.layer\.)(\d+)\.(first\.|second\.)?")
"""Name of a layer of the text and fusion encoder: its number, and which half of a doubled layer."""
HALVES = ("first.", "second.")


def to_official(module: Any) -> dict[str, Tensor]:
    """Return the state of a module under the authors' names: of pre-training at the paper's sizes 844 entries.

    A module with queues has the pre-training layout with a language-model head, else the retrieval layout. The authors'
    queues are feature-major [E, Q] and share one pointer and one row of ids: the pointer is the image queue's, and a
    slot whose two keys belong to different images has no id. An empty slot is a column of zeros.

    Args:
        module: an `ALBEFModule`, or the module of a task.
    """
    state = module.state_dict()
    flat = not any(".text_encoder.cls." in name for name in state)
    position_ids = {
        name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name.endswith(_POSITION_IDS)
    }
    official = {
        official_name(name, flat, module.text.depth): tensor
        for name, tensor in (state | position_ids).items()
        if not name.startswith(TRAINING_STATE)
    }
    if "temp" in official:
        official["temp"] = official["temp"].squeeze(0)
    if not any(name.startswith(QUEUES) for name in state):
        return official
    official |= {
        "image_queue": state["image_queue.features"].T,
        "text_queue": state["text_queue.features"].T,
        "queue_ptr": state["image_queue.pointer"].reshape(1),
    }
    if flat:
        image_ids, text_ids = (state[f"{name}.ids"].unflatten(0, (-1, 1)).flatten(1)[:, 0] for name in QUEUES)
        same_image = (image_ids == text_ids) & (image_ids != NO_ID)
        official["idx_queue"] = torch.where(same_image, image_ids, _OFFICIAL_NO_ID)[None]
    return official


def from_official(official: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the authors' state dict with the names of this package; other names are kept.

    A queue counts as filled up to its last column that is not zero; the authors' queues are always full.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in official.items():
        module, _, parameter = name.partition(".")
        network = "teacher" if module.endswith("_m") else "student"
        module = module.removesuffix("_m")
        if module == "text_encoder" and parameter.startswith(("embeddings.", "encoder.")):
            parameter = f"bert.{parameter}"
        if parameter == _POSITION_IDS:  # 0, 1, 2, ...; missing in files of later versions of transformers
            continue
        renamed = f"{network}.{module}.{parameter}" if module in _MODULES else name
        # In a file with both forms of a name, the second stays, and loading refuses it.
        state[name if renamed in state else renamed] = tensor

    if "temp" in state:
        state["temperature"] = state.pop("temp").reshape(1)
    pointer = state.pop("queue_ptr", None)
    ids = state.pop("idx_queue", None)
    for queue in QUEUES:
        if queue in state:
            features = state.pop(queue).T
            filled = features.any(1) * torch.arange(1, 1 + len(features), device=features.device)
            state[f"{queue}.features"] = features
            state[f"{queue}.filled"] = filled.max() if len(filled) else filled.sum()
            state[f"{queue}.ids"] = torch.full((len(features),), NO_ID)
        if ids is not None:
            state[f"{queue}.ids"] = torch.where(ids == _OFFICIAL_NO_ID, NO_ID, ids).flatten()
        if pointer is not None:
            state[f"{queue}.pointer"] = pointer.reshape(())
    return state


def is_flat(official: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict of the authors has no level `bert.`."""
    return any(name.startswith("text_encoder.embeddings.") for name in official)


def official_name(name: str, flat: bool, depth: int = 0) -> str:
    """Return the authors' name of a tensor.

    Args:
        name: name in this package.
        flat: whether the authors' names have no level `bert.`; the decoder of VQA has it in any case.
        depth: number of text layers, which are not doubled.
    """

    def numbered(match: re.Match[str]) -> str:
        layer = int(match[2])
        if match[3]:
            layer = depth + 2 * (layer - depth) + HALVES.index(match[3])
        return f"{match[1]}{layer}."

    name = LAYER.sub(numbered, name)
    root, _, inner = name.partition(".")
    if root in ("student", "teacher"):
        module, _, parameter = inner.partition(".")
        if flat and module == "text_encoder":
            parameter = parameter.removeprefix("bert.")
        return f"{module}{'_m' if root == 'teacher' else ''}.{parameter}"
    if root in QUEUES:
        return "queue_ptr" if inner == "pointer" else root
    return "temp" if name == "temperature" else name


def save_official(module: Any, path: str | Path) -> None:
    """Write `to_official` to a file that the authors' scripts load with `--checkpoint`.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    AtomicCheckpointIO().save_checkpoint({"model": to_official(module)}, path)
