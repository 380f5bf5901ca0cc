"""Trained classifiers out of files: the public checkpoints of the CRD benchmark, and our own."""

import pickle
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .cifar import CIFAR_NETWORKS, Classifier
from .classifiers import public_network

_STUDENT, _WRAPPED = "student.", "module."
_LIBRARY = "network."  # before a library's own names, in our checkpoints
_COUNTER = "num_batches_tracked"  # BatchNorm counts since PyTorch 0.4.1


def read_classifier(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a classifier.

    Args:
        path: a file of `torch.save` with the state dict itself or under `model` or `state_dict`, where other entries
            are ignored; a Lightning checkpoint of a module with a `student`; or a `.safetensors` file. The prefix
            `module.` of DataParallel is left out, and where there are entries of a `student`, only these are taken.

    Returns:
        The state dict under the names of the network.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or holds something else; the sentence says what.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"Found no file {str(path)!r}, expected a checkpoint of a classifier: correct the path, or download it."
        )
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    state = content.get("model", content.get("state_dict", content))
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"Found neither a state dict nor one under 'model' or 'state_dict' in {str(path)!r}, expected the "
            "checkpoint of a classifier: correct the path."
        )
    if all(name.startswith(_WRAPPED) for name in state):
        state = _below(_WRAPPED, state)
    student = _below(_STUDENT, state)
    if not student and "hyper_parameters" in content:
        raise ValueError(
            f"Found no weights of a student in {str(path)!r}, expected a Lightning checkpoint of a distillation: "
            "correct the path."
        )
    return student or state


def public_state(classifier: Classifier, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under the public names of a classifier, which our own checkpoints of a library's network do not have.

    Args:
        classifier: whose state it is.
        state: under these names, or those of a checkpoint of ours.
    """
    own = public_network(classifier).state_dict()
    return _below(_LIBRARY, state) if all(_LIBRARY + name in state for name in own) else dict(state)


def load_classifier(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict of which every key and every shape fits.

    Only the batch counters of BatchNorm may be missing: old checkpoints have none.

    Args:
        network: what to fill.
        state: its whole state.
        source: where it is from, for messages; for example "the checkpoint 'resnet20.pth'".

    Raises:
        ValueError: if it is of another network, or was trained for another number of classes. Nothing is loaded then.
    """
    own = network.state_dict()
    state = {name: value for name, value in own.items() if name.endswith(_COUNTER)} | dict(state)
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    misshapen = [name for name in own if name in state and own[name].shape != state[name].shape]
    if not (missing or unknown or misshapen):
        network.load_state_dict(state)
        return

    head, theirs = _head(own), _head(state)
    if not (missing or unknown) and head and head == theirs and set(misshapen) == _of_layer(head, own):
        raise ValueError(
            f"Found weights trained for {len(state[head])} classes in {source}, this network has {len(own[head])}: "
            "take weights of this dataset, or set the number of classes to theirs."
        )
    differences = "; ".join(
        f"{len(names)} {what} {'key' if len(names) == 1 else 'keys'}: {_first(names)}"
        for what, names in (("missing", missing), ("unexpected", unknown), ("misshapen", misshapen))
        if names
    )
    found, expected = _name_in_zoo(state), _name_in_zoo(own) or type(network).__name__
    raise ValueError(
        f"Found weights in {source} that do not fit, expected those of {expected} ({differences}): "
        + (f"they are those of {found}, build that one." if found else "build the network that they were saved from.")
    )


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return dict(load_file(path))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"Cannot read {str(path)!r} ({error}): it is damaged, get it again.") from error


def _read_pickle(path: Path) -> dict[str, Any]:
    """What a file of `torch.save` holds: tensors, plain data and numpy's numbers only."""
    try:
        with torch.serialization.safe_globals(_numpy_numbers()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    # Releases of PyTorch differ in whether they make one UnpicklingError of all that damage leads to.
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, struct.error) as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise ValueError(
                f"Found {foreign[1]} in {str(path)!r}, expected tensors and plain data: if you trust where it comes "
                "from, load it with torch.load(..., weights_only=False) and save its state dict alone."
            ) from error
        raise ValueError(
            f"Found no checkpoint in {str(path)!r}, expected a file of torch.save: it is damaged or of another kind."
        ) from error
    return content if isinstance(content, dict) else {}


def _numpy_numbers() -> list[Any]:
    """What unpickling the accuracies takes that trainers keep as numpy numbers, as mdistiller does."""
    scalar: Any = np.float64(0).__reduce__()[0]
    names = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")  # of numpy 2, and before
    kinds = [type(np.dtype(kind)) for kind in ("float32", "float64", "int64")]
    return [np.dtype, *kinds, *((scalar, name) for name in names)]


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _head(state: Mapping[str, Tensor]) -> str | None:
    """The key of the linear layer's weight: the only matrix of a network for classification."""
    matrices = [name for name, value in state.items() if value.dim() == 2]
    return matrices[0] if len(matrices) == 1 else None


def _of_layer(weight: str, own: Mapping[str, Tensor]) -> set[str]:
    return {weight, f"{weight.removesuffix('weight')}bias"} & own.keys()


def _name_in_zoo(state: Mapping[str, Tensor]) -> str | None:
    """Name of the CIFAR network that a state dict is of, whatever its number of classes."""
    head = _head(state)
    if head is None:
        return None
    shapes = _shapes(state)
    with torch.device("meta"):  # costs no memory and draws no numbers
        for name, build in CIFAR_NETWORKS.items():
            if _shapes(build(len(state[head])).state_dict()) == shapes:
                return name
    return None


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if not name.endswith(_COUNTER)}


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
