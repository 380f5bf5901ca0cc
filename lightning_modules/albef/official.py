"""The checkpoint layout of ALBEF's authors: conversion between their names and those of this package.

There are two families of files; `downstream/official.py` has those of the other tasks. Pre-training has
`text_encoder.bert.*` and the language-model head `text_encoder.cls.*`; retrieval has neither the level `bert.` nor the
head, but the image ids of the queues, `idx_queue`. The teacher's names carry `_m`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ...callbacks.queue import NO_ID

QUEUES = ("image_queue", "text_queue")
_MODULES = ("visual_encoder", "text_encoder", "text_decoder", "vision_proj", "text_proj", "cls_head", "ta_head")
_POSITION_IDS = "bert.embeddings.position_ids"
_OFFICIAL_NO_ID = -100


def to_official(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state under the authors' names: at the paper's sizes 844 entries with the head.

    The result has the pre-training layout with a language-model head, else the retrieval layout. The authors' queues
    are feature-major [E, Q] and share one pointer and one row of ids: the pointer is the image queue's, and a slot
    whose two keys belong to different images has no id. An empty slot is a column of zeros.

    Args:
        module: an `ALBEFModule`: with the networks `student` and `teacher`, a matching head, a temperature and queues.
    """
    state = module.state_dict()
    flat = not any(".text_encoder.cls." in name for name in state)
    official = {
        official_name(name, flat): tensor
        for name, tensor in state.items()
        if not name.startswith(("temperature", *QUEUES))
    }
    for network in ("student", "teacher"):
        positions = module.get_buffer(f"{network}.text_encoder.{_POSITION_IDS}")
        official[official_name(f"{network}.text_encoder.{_POSITION_IDS}", flat)] = positions
    official |= {
        "temp": state["temperature"].squeeze(0),
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


def official_name(name: str, flat: bool) -> str:
    """Return the authors' name of a tensor.

    Args:
        name: name in this package.
        flat: whether the authors' names have no level `bert.`; the decoder of VQA has it in any case.
    """
    root, _, inner = name.partition(".")
    if root in ("student", "teacher"):
        module, _, parameter = inner.partition(".")
        if flat and module == "text_encoder":
            parameter = parameter.removeprefix("bert.")
        return f"{module}{'_m' if root == 'teacher' else ''}.{parameter}"
    if root in QUEUES:
        return "queue_ptr" if inner == "pointer" else root
    return "temp" if name == "temperature" else name


def save_official(module: nn.Module, path: str | Path) -> None:
    """Write `to_official` to a file that the authors' scripts load with `--checkpoint`.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    AtomicCheckpointIO().save_checkpoint({"model": to_official(module)}, path)
