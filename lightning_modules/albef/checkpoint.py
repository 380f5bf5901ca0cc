"""The authors' checkpoint layout: which of their keys holds which of our tensors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .module import ALBEFModule

_PARTS = ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
_POSITION_IDS = "bert.embeddings.position_ids"


def _key_pairs(module: "ALBEFModule") -> Iterator[tuple[str, str]]:
    """Yield (authors' key, our key) for every tensor that both layouts hold in the same shape."""
    for own in module.state_dict():
        root, _, rest = own.partition(".")
        if root in ("student", "teacher"):
            part, _, name = rest.partition(".")
            yield f"{part}{'_m' if root == 'teacher' else ''}.{name}", own
        elif root == "itm_head":
            yield own, own


def to_official(module: "ALBEFModule") -> dict[str, Tensor]:
    """Return the module's state under the authors' keys: 844 entries at the paper's sizes.

    Their queues are feature-major [E, Q], their temperature is 0-D and called `temp`, and their BERT keeps a buffer of
    position numbers.
    """
    state = module.state_dict()
    official = {theirs: state[ours] for theirs, ours in _key_pairs(module)}
    positions = module.student.text_encoder.bert.embeddings.position_ids
    official |= {f"text_encoder{suffix}.{_POSITION_IDS}": positions for suffix in ("", "_m")}
    official |= {
        "temp": state["temperature"].squeeze(0),
        "image_queue": state["image_queue.features"].T,
        "text_queue": state["text_queue.features"].T,
        "queue_ptr": state["image_queue.pointer"].reshape(1),
    }
    return official


def load_official(module: "ALBEFModule", official: dict[str, Tensor]) -> None:
    """Load a pre-training state dict in the authors' layout, strictly.

    The authors' queue is always full (it starts with random vectors), so ours counts as full afterwards.

    Raises:
        ValueError: if a key is missing or unknown; the sentence lists both.
    """
    pairs = dict(_key_pairs(module))
    extra = {"temp", "image_queue", "text_queue", "queue_ptr"}
    # transformers made the position numbers non-persistent, so files written since may lack them.
    optional = {f"text_encoder{suffix}.{_POSITION_IDS}" for suffix in ("", "_m")}
    missing = sorted((pairs.keys() | extra) - official.keys())
    unknown = sorted(official.keys() - pairs.keys() - extra - optional)
    if missing or unknown:
        raise ValueError(
            f"This is no ALBEF pre-training checkpoint of this size: missing keys {missing}, unknown keys {unknown}."
        )
    state = {ours: official[theirs] for theirs, ours in pairs.items()}
    state["temperature"] = official["temp"].reshape(1)
    for name in ("image_queue", "text_queue"):
        state[f"{name}.features"] = official[name].T
        state[f"{name}.pointer"] = official["queue_ptr"].reshape(())
        state[f"{name}.filled"] = torch.tensor(official[name].shape[1])
        state[f"{name}.ids"] = torch.full((official[name].shape[1],), -1)
    module.load_state_dict(state)
