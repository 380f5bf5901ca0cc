"""Weights of trained classifiers: public checkpoints of the CRD benchmark, and those of this package.

`load_frozen` loads a classifier that stays frozen: a teacher, or the backbone of a linear probe.
"""

import functools
import pickle
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.names import nearest_path
from ..core.frozen import Frozen, reads_weights
from .cifar import CIFAR_NETWORKS, Classifier
from .classifiers import build_classifier, public_network

_STUDENT = "student."  # prefix of checkpoints of this package
_WRAPPED = "module."  # prefix of DataParallel
_LIBRARY = "network."  # prefix of the names of a library's model in checkpoints of this package
_COUNTER = "num_batches_tracked"  # of BatchNorm, since PyTorch 0.4.1
_PLAIN = "--config configs/cocord/base.yaml --config configs/cocord/vanilla.yaml"
TRAINING = {
    "cocord_quickstart_teacher": "--config configs/cocord/quickstart_teacher.yaml",
    "shre_quickstart_teacher": "--config configs/shre/quickstart_teacher.yaml",
} | {
    f"cocord_teacher_{name}": f"{_PLAIN} --config configs/cocord/teacher_{name}.yaml"
    for name in ("resnet110", "resnet32x4", "resnet50", "resnet56", "vgg13", "wrn_40_2")
}
"""Arguments of `vlightning fit` that train a teacher with a shipped config, by the name of the run."""


def load_frozen(frozen: Frozen[Classifier], name: str, source: str | None, classes: int) -> None:
    """Load the weights of a frozen network unless they are loaded, and record their origin.

    Args:
        frozen: network to fill.
        name: name of the network.
        source: a file; the folder of a run, whose newest last checkpoint is used; or the name of the library's weights.
        classes: number of classes of the network.

    Raises:
        UserError: If there is no source or no such file (the message names the command that trains the network), the
            weights belong to another network or another number of classes, or are non-finite, or a restored checkpoint
            was trained with other weights.
    """
    if frozen.loaded:
        return
    if not reads_weights():
        frozen.record(name, str(source))
        return
    role = frozen.role
    if source is None:
        raise UserError(f"Expected weights of the {role} {name}, got none: set {frozen.argument}, or {_advice(name)}")
    network = public_network(frozen.network)
    if not _is_file_name(source):
        trained = build_classifier(name, classes, pretrained=source)
        network.load_state_dict(public_network(trained).state_dict())
        frozen.record(name, source)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        path = max(path.rglob("last.ckpt"), key=lambda file: file.stat().st_mtime, default=path)
    if not path.is_file():
        near = nearest_path(source) if path.suffix else ""  # not another run in place of one that is to be trained
        advice = "correct the path." if near else _advice(name, source)
        raise UserError(f"Expected a trained {role} in {source!r}, got no file{near}: {advice}")
    load_classifier_file(frozen.network, path, f"the {role} file")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values()):
        raise UserError(
            f"Expected finite weights in the {role} file {str(path)!r}, got non-finite ones: train it again."
        )
    frozen.record(name, str(path))


def read_classifier(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a classifier.

    Args:
        path: file of `torch.save` with the state dict itself or in the entry `model` or `state_dict` (other entries
            are ignored); Lightning checkpoint of a module with a `student`; or `.safetensors` file. The prefix
            `module.` of DataParallel is removed. Of a state dict with a `student`, only the student is read.

    Returns:
        The state dict with the names of the network.

    Raises:
        UserError: If there is no such file, it is damaged, or it holds something else.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"Expected a checkpoint of a classifier in {str(path)!r}, got no file: correct the path.")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    state = content.get("model", content.get("state_dict", content))
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"Expected a state dict in {str(path)!r}, or one in its entry 'model' or 'state_dict', got neither: give "
            "the checkpoint of a classifier."
        )
    if all(name.startswith(_WRAPPED) for name in state):
        state = _below(_WRAPPED, state)
    student = _below(_STUDENT, state)
    if not student and "hyper_parameters" in content:
        raise UserError(
            f"Expected a Lightning checkpoint with a student in {str(path)!r}, got one without: give the checkpoint of "
            "a CoCoRDModule."
        )
    return student or state


def public_state(classifier: Classifier, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the entries of a classifier's state dict to the public names.

    Args:
        classifier: the classifier that the state belongs to.
        state: state dict with the public names, or with those of a checkpoint of this package.
    """
    public_names = public_network(classifier).state_dict()
    return _below(_LIBRARY, state) if all(_LIBRARY + name in state for name in public_names) else dict(state)


def load_classifier(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict whose keys and shapes are those of the network, or nothing.

    Only the batch counters of BatchNorm may be missing, as they are in old checkpoints.

    Args:
        network: network to fill.
        state: complete state dict.
        source: origin of the state for messages, for example "the checkpoint 'resnet20.pth'".

    Raises:
        UserError: If the state belongs to another network, or was trained for another number of classes.
    """
    expected_state = network.state_dict()
    state = {name: value for name, value in expected_state.items() if name.endswith(_COUNTER)} | dict(state)
    missing = [name for name in expected_state if name not in state]
    unexpected = [name for name in state if name not in expected_state]
    misshapen = [name for name in expected_state if name in state and expected_state[name].shape != state[name].shape]
    if not (missing or unexpected or misshapen):
        network.load_state_dict(state)
        return

    head = _head(expected_state)
    same_names = not (missing or unexpected) and head == _head(state)
    if same_names and head and set(misshapen) == {head, f"{head.removesuffix('weight')}bias"} & expected_state.keys():
        classes = len(expected_state[head])
        raise UserError(
            f"Expected weights for {classes} classes in {source}, got weights for {len(state[head])}: use "
            "weights trained on this dataset, or set the number of classes to that of the weights."
        )
    differences = "; ".join(
        f"{len(names)} {problem} {'key' if len(names) == 1 else 'keys'}: {_first(names)}"
        for problem, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    )
    expected = _cifar_name(expected_state) or type(network).__name__
    trained = _cifar_name(state)
    raise UserError(
        f"Expected weights of {expected} in {source}, got those of {trained or 'another network'} ({differences}): "
        + (f"build {trained}." if trained else "build the network that they were saved from.")
    )


def load_classifier_file(classifier: Classifier, path: str | Path, description: str) -> None:
    """Load a classifier from a file that `read_classifier` reads.

    Args:
        classifier: classifier to fill.
        path: the file.
        description: description of the file for messages, for example "the teacher's weights".

    Raises:
        UserError: If the file cannot be read, or does not fit. Nothing is loaded then.
    """
    state = public_state(classifier, read_classifier(path))
    load_classifier(public_network(classifier), state, f"{description} {str(path)!r}")


def _is_file_name(source: str) -> bool:
    return "/" in source or Path(source).suffix != "" or Path(source).exists()


def _advice(name: str, source: str = "") -> str:
    """Return the command that trains a network: for the run `source`, or for any run of the network."""
    runs = [*Path(source).parts, f"cocord_teacher_{name.lower()}"]
    arguments = next((TRAINING[run] for run in runs if run in TRAINING), f"{_PLAIN} --model.student {name}")
    return f"train it first with `vlightning fit {arguments}`."


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return dict(load_file(path))
    except (SafetensorError, ValueError) as error:
        raise UserError(
            f"Expected a safetensors file in {str(path)!r}, got a damaged file ({error}): download it again."
        ) from error


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a file of `torch.save` with tensors, plain data and numpy scalars, and nothing else."""
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    # Only some releases of PyTorch turn all errors from damaged files into an UnpicklingError.
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, struct.error) as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise UserError(
                f"Expected tensors and plain data in {str(path)!r}, got {foreign[1]}: if you trust the file, load it "
                "with torch.load(..., weights_only=False) and save its state dict alone."
            ) from error
        raise UserError(
            f"Expected a file of torch.save in {str(path)!r}, got a damaged file or another format: download it again."
        ) from error
    return content if isinstance(content, dict) else {}


def _numpy_scalars() -> list[Any]:
    """Return the globals that unpickling numpy scalars needs; mdistiller stores accuracies as such."""
    scalar: Any = np.float64(0).__reduce__()[0]
    names = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")  # numpy 2 and numpy 1
    dtypes = [type(np.dtype(dtype)) for dtype in ("float32", "float64", "int64")]
    return [np.dtype, *dtypes, *((scalar, name) for name in names)]


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _head(state: Mapping[str, Tensor]) -> str | None:
    """Return the key of the linear layer's weight, the only matrix of a CNN classifier; None without one."""
    matrices = [name for name, value in state.items() if value.dim() == 2]
    return matrices[0] if len(matrices) == 1 else None


def _cifar_name(state: Mapping[str, Tensor]) -> str | None:
    """Return the CIFAR network that a state dict belongs to, for any number of classes; None if there is none."""
    head = _head(state)
    if head is None:
        return None
    shapes = _shapes(state)
    return next((name for name in CIFAR_NETWORKS if _cifar_shapes(name, len(state[head])) == shapes), None)


@functools.cache
def _cifar_shapes(name: str, classes: int) -> dict[str, torch.Size]:
    with torch.device("meta"):  # needs neither memory nor random numbers
        return _shapes(CIFAR_NETWORKS[name](classes).state_dict())


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if not name.endswith(_COUNTER)}


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
