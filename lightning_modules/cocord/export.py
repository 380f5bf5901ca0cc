"""Export of CoCoRD checkpoints: the student, without teacher, heads and dictionary."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision.models import ResNet

from ...callbacks.checkpoints.checkpoint_io import write_file
from ...common.errors import UserError
from ...common.files import replacing, writing
from ...common.preprocessing import described, recorded_preprocessing
from ..networks.classifier_files import load_classifier, public_state
from ..networks.classifiers import build_classifier, public_network

LAYOUTS = {
    "student": "a .safetensors, .pth or .pt file of the student with its public names; .pth and .pt files hold it in "
    "the entry 'model'",
    "torchvision": "the same kinds of file with the backbone of a torchvision ResNet, without last layer and batch "
    "counters; .pth and .pt files hold the state dict itself",
    "detectron2": "a .pkl file with the same backbone for detectron2",
}
"""Description of each layout; the first is the default."""
_TENSOR_FILES = (".safetensors", ".pth", ".pt")
_FILES = {"student": _TENSOR_FILES, "torchvision": _TENSOR_FILES, "detectron2": (".pkl",)}
_IMAGENET = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the student of a checkpoint; the teacher's file is not needed.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: file to write.
        layout: one of `LAYOUTS`.

    Returns:
        Description of the file.

    Raises:
        UserError: If the target is a folder, its suffix is none of the layout's, the student has no such layout, the
            checkpoint does not fit its settings, or the file cannot be written.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        raise UserError(f"Expected the name of a new file, such as student.pth, got the folder {target!r}.")
    if path.suffix not in _FILES[layout]:
        raise UserError(
            f"Expected the suffix {' or '.join(_FILES[layout])} for the layout {layout!r}, got {path.suffix!r} in "
            f"{target!r}: rename the target."
        )
    name, state = _student(content, source, backbone=layout != "student")
    record = recorded_preprocessing(content)
    preprocessing = {} if record is None else {"preprocessing": record}
    metadata = {"network": name} | {entry: json.dumps(value) for entry, value in preprocessing.items()}
    if layout == "student":
        classes = str(content["hyper_parameters"]["num_classes"])
        _write(path, {"model": state, **preprocessing}, metadata | {"num_classes": classes})
        return f"Wrote {target} with the student {name}, {len(state)} tensors; {described(record)}."
    if layout == "torchvision":
        _write(path, state, metadata)
        tensors = f"{len(state)} tensors in torchvision's layout"
        return f"Wrote {target} with the backbone of {name}, {tensors}; {described(record)}."
    # numpy has no bfloat16
    model = {detectron2_name(key): tensor.float().numpy() for key, tensor in state.items()}
    # With matching_heuristics detectron2 compares the ends of names, so the detector's prefix does not matter.
    _write(path, {"model": model, "__author__": "vlightning", "matching_heuristics": True})
    arrays = f"{len(model)} arrays in detectron2's layout"
    return f"Wrote {target} with the backbone of {name}, {arrays}, which {_needed(record)}; {described(record)}."


def _needed(record: Mapping[str, Any] | None) -> str:
    """Describe the settings of images that detectron2's configuration needs: the file cannot hold them."""
    recorded = record if record is not None and "mean" in record else None
    normalization = recorded or _IMAGENET
    mean, std = (", ".join(f"{255 * value:.3f}" for value in normalization[name]) for name in ("mean", "std"))
    other = "" if recorded else " (ImageNet's; for other data: its mean and std times 255)"
    return (
        f'needs the preprocessing of its training: set INPUT.FORMAT "RGB", MODEL.PIXEL_MEAN [{mean}], '
        f"MODEL.PIXEL_STD [{std}]{other} and MODEL.RESNETS.STRIDE_IN_1X1 False; with other values detectron2 silently "
        "loses accuracy"
    )


def detectron2_name(name: str) -> str:
    """Return detectron2's name of a tensor of torchvision's ResNet, such as layer1.0.downsample.1.bias."""
    stage = re.match(r"layer(\d)\.", name)
    name = f"res{int(stage[1]) + 1}.{name[stage.end() :]}" if stage else f"stem.{name}"
    name = re.sub(r"\bbn(\d)\.", r"conv\1.norm.", name)
    return name.replace(".downsample.0.", ".shortcut.").replace(".downsample.1.", ".shortcut.norm.")


def _student(content: Mapping[str, Any], source: str, backbone: bool) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the student's network, and its state dict with the public names."""
    arguments = content["hyper_parameters"]
    missing = [name for name in ("student", "num_classes") if name not in arguments]
    if missing:
        raise UserError(
            f"Expected the hyper_parameters of CoCoRDModule in {source}, got no {' and no '.join(missing)}: it is of "
            "another class, or of another version of vlightning."
        )
    name = arguments["student"]
    classifier = build_classifier(name, arguments["num_classes"])
    network = public_network(classifier)
    if backbone and not isinstance(network, ResNet):
        raise UserError(
            f"Expected a ResNet of torchvision for this layout, such as resnet50, got the student {name} in {source}: "
            "use the layout 'student'."
        )
    entries = content["state_dict"].items()
    state = public_state(
        classifier, {key.removeprefix("student."): value for key, value in entries if key.startswith("student.")}
    )
    load_classifier(network, state, source)
    names = [
        key
        for key in network.state_dict()
        if not (backbone and (key.startswith("fc.") or key.endswith("num_batches_tracked")))
    ]
    # Convolutions are in channels-last format after training, and tensors may share storage.
    return name, {key: state[key].detach().clone(memory_format=torch.contiguous_format) for key in names}


def _write(path: Path, content: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a file atomically, by its suffix with torch.save, pickle or safetensors."""
    with replacing(path) as staged, writing(path):
        if path.suffix == ".safetensors":
            save_file(content.get("model", content), staged, {"format": "pt", **(metadata or {})})
        elif path.suffix == ".pkl":
            staged.write_bytes(pickle.dumps(content))
        else:
            write_file(content, staged)
