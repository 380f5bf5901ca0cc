"""The checkpoint layout of ALBEF's authors: conversion between their names and those of this package.

There are two families of files; `downstream/official.py` has those of the other tasks. Pre-training has
`text_encoder.bert.*` and the language-model head `text_encoder.cls.*`; retrieval has neither the level `bert.` nor the
head, but the image ids of the queues, `idx_queue`. The teacher's names carry `_m`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...callbacks import AtomicCheckpointIO
from ...callbacks.queue import NO_ID

if TYPE_CHECKING:
    from .module import ALBEFModule

QUEUES = ("image_queue", "text_queue")
_PARTS = ("visual_encoder", "text_encoder", "text_decoder", "vision_proj", "text_proj", "cls_head", "ta_head")
_POSITION_IDS = "bert.embeddings.position_ids"
_OFFICIAL_NO_ID = -100


def to_official(module: "ALBEFModule") -> dict[str, Tensor]:
    """Return the module's state under the authors' names: at the paper's sizes 844 entries with the head.

    The result has the pre-training layout with a language-model head (`mlm=True`), else the retrieval layout. The
    authors' queues are feature-major [E, Q] and share one pointer and one row of ids: the pointer is the image queue's,
    and a slot whose two keys belong to different images has no id. An empty slot is a column of zeros.
    """
    state = module.state_dict()
    flat = not module.mlm
    official = {
        official_name(own, flat): tensor
        for own, tensor in state.items()
        if not own.startswith(("temperature", *QUEUES))
    }
    positions = module.student.text_encoder.bert.embeddings.position_ids
    official |= {
        official_name(f"{root}.text_encoder.{_POSITION_IDS}", flat): positions for root in ("student", "teacher")
    }
    official |= {
        "temp": state["temperature"].squeeze(0),
        "image_queue": state["image_queue.features"].T,
        "text_queue": state["text_queue.features"].T,
        "queue_ptr": state["image_queue.pointer"].reshape(1),
    }
    if flat:
        image_ids, text_ids = (state[f"{name}.ids"].unflatten(0, (-1, 1)).flatten(1)[:, 0] for name in QUEUES)
        # Older checkpoints of this package have -1 in empty slots.
        filled = torch.arange(len(image_ids), device=image_ids.device) < state["image_queue.filled"]
        known = (image_ids == text_ids) & (image_ids != NO_ID) & filled
        official["idx_queue"] = torch.where(known, image_ids, _OFFICIAL_NO_ID)[None]
    return official


def from_official(official: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the authors' state dict with the names of this package; unknown names are kept.

    A queue counts as filled up to its last column that is not zero; the authors' queues are always full.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in official.items():
        part, _, inner = name.partition(".")
        root = "teacher" if part.endswith("_m") else "student"
        part = part.removesuffix("_m")
        if part == "text_encoder" and inner.startswith(("embeddings.", "encoder.")):
            inner = f"bert.{inner}"
        if inner == _POSITION_IDS:  # 0, 1, 2, ...; missing in files of later versions of transformers
            continue
        own = f"{root}.{part}.{inner}" if part in _PARTS else name
        state[name if own in state else own] = tensor  # of a file with both forms of a name, one is unknown

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
            state[f"{queue}.ids"] = torch.where(ids == _OFFICIAL_NO_ID, NO_ID, ids).flatten()
        if pointer is not None:
            state[f"{queue}.pointer"] = pointer.reshape(())
    return state


def is_flat(official: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict of the authors has no level `bert.`."""
    return any(name.startswith("text_encoder.embeddings.") for name in official)


def official_name(own: str, flat: bool) -> str:
    """Return the authors' name of a tensor.

    Args:
        own: name in this package.
        flat: whether the authors' names have no level `bert.`.
    """
    root, _, inner = own.partition(".")
    if root in ("student", "teacher"):
        part, _, name = inner.partition(".")
        name = (
            name.removeprefix("bert.") if flat and part == "text_encoder" else name
        )  # the decoder of VQA has the level
        return f"{part}{'_m' if root == 'teacher' else ''}.{name}"
    if root in QUEUES:
        return "queue_ptr" if inner == "pointer" else root
    return "temp" if own == "temperature" else own


def save_official(module: "ALBEFModule", path: str | Path) -> None:
    """Write `to_official` to a file that the authors' scripts load with `--checkpoint`.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    AtomicCheckpointIO().save_checkpoint({"model": to_official(module)}, path)
