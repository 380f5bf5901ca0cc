"""What `vlightning export` writes of a CoCoRD checkpoint: the student, without what it learned with."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models import ResNet

from ...callbacks.checkpoints.checkpoint_io import write_file
from ...common.files import replacing, writing
from ...datamodules.transforms.classification import IMAGENET_MEAN, IMAGENET_STD
from ..base.preprocessing import recorded_preprocessing, said
from ..networks.classifier_files import load_classifier, public_state
from ..networks.classifiers import build_classifier, public_network

LAYOUTS = {
    "student": "a .safetensors, .pth or .pt file of the student under its public names, a library's own for its "
    "models; .pth and .pt hold it as the entry 'model'",
    "torchvision": "the same kinds of file with the backbone of a torchvision ResNet: no last layer, no batch "
    "counters; .pth and .pt hold the bare state dict",
    "detectron2": "a .pkl file with the same backbone as detectron2 reads it",
}
"""What each layout is; the first is the default."""
_TENSOR_FILES = (".safetensors", ".pth", ".pt")
_FILES = {"student": _TENSOR_FILES, "torchvision": _TENSOR_FILES, "detectron2": (".pkl",)}
_IMAGENET = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the student of a checkpoint; the teacher's file is not needed.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.
        target: the file to write; there is nothing of that name, or an empty folder.
        layout: one of `LAYOUTS`.

    Returns:
        What was written.

    Raises:
        FileExistsError: if the target is a folder.
        ValueError: if its suffix is none of the layout's, the student has no such layout, or the checkpoint does not
            fit its own arguments.
        OSError: if the file cannot be written.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        raise FileExistsError(f"Found a folder {target!r}, expected the name of a new file, such as student.pth.")
    if path.suffix not in _FILES[layout]:
        raise ValueError(
            f"Found the suffix {path.suffix!r} in {target!r}, expected {' or '.join(_FILES[layout])} for the layout "
            f"{layout!r}: rename the target."
        )
    name, state = _student(content, source, backbone=layout != "student")
    look = recorded_preprocessing(content)
    known = {} if look is None else {"preprocessing": look}
    about = {"network": name} | {entry: json.dumps(record) for entry, record in known.items()}
    if layout == "student":
        classes = str(content["hyper_parameters"]["num_classes"])
        _write(path, {"model": state, **known}, about | {"num_classes": classes})
        return f"Wrote {target} with the student {name}, {len(state)} tensors; {said(look)}."
    if layout == "torchvision":
        _write(path, state, about)
        tensors = f"{len(state)} tensors in torchvision's layout"
        return f"Wrote {target} with the backbone of {name}, {tensors}; {said(look)}."
    model = {detectron2_name(key): _array(tensor) for key, tensor in state.items()}
    # matching_heuristics: detectron2 finds the names by how they end, whatever its detector calls the backbone.
    _write(path, {"model": model, "__author__": "vlightning", "matching_heuristics": True})
    arrays = f"{len(model)} arrays in detectron2's layout"
    return f"Wrote {target} with the backbone of {name}, {arrays}, which {_needed(look)}; {said(look)}."


def _needed(look: Mapping[str, Any] | None) -> str:
    """What detectron2's configuration has to say of images, since the file cannot."""
    known = look if look is not None and "mean" in look else None
    mean, std = (", ".join(f"{255 * value:.3f}" for value in (known or _IMAGENET)[name]) for name in ("mean", "std"))
    other = "" if known else " (as ImageNet's recipe has it; other data: its mean and std times 255)"
    return (
        f'expects images as its training prepared them, so set INPUT.FORMAT "RGB", MODEL.PIXEL_MEAN [{mean}], '
        f"MODEL.PIXEL_STD [{std}]{other} and MODEL.RESNETS.STRIDE_IN_1X1 False, without which it loses accuracy and "
        "nothing says so"
    )


def detectron2_name(name: str) -> str:
    """The name that detectron2 gives to what torchvision's ResNet calls `name`, such as layer1.0.downsample.1.bias."""
    stage = re.match(r"layer(\d)\.", name)
    name = f"res{int(stage[1]) + 1}.{name[stage.end() :]}" if stage else f"stem.{name}"
    name = re.sub(r"\bbn(\d)\.", r"conv\1.norm.", name)
    return name.replace(".downsample.0.", ".shortcut.").replace(".downsample.1.", ".shortcut.norm.")


def _student(content: Mapping[str, Any], source: str, backbone: bool) -> tuple[str, dict[str, Tensor]]:
    """Name of the student's network, and its state under the public names."""
    arguments = content["hyper_parameters"]
    missing = [name for name in ("student", "num_classes") if name not in arguments]
    if missing:
        raise ValueError(
            f"Found no {' and no '.join(missing)} among the hyper_parameters of {source}, expected those of "
            "CoCoRDModule: it is of another class, or of another version of vlightning."
        )
    name = arguments["student"]
    classifier = build_classifier(name, arguments["num_classes"])
    network = public_network(classifier)
    if backbone and not isinstance(network, ResNet):
        raise ValueError(
            f"Found the student {name} in {source}, expected a ResNet of torchvision for this layout, such as "
            "resnet50: export it in the layout 'student'."
        )
    entries = content["state_dict"].items()
    state = public_state(
        classifier, {key.removeprefix("student."): value for key, value in entries if key.startswith("student.")}
    )
    load_classifier(network, state, source)
    kept = [
        key
        for key in network.state_dict()
        if not (backbone and (key.startswith("fc.") or key.endswith("num_batches_tracked")))
    ]
    # A training lays convolutions out with channels last, and several tensors may be views of one storage.
    return name, {key: state[key].detach().clone(memory_format=torch.contiguous_format) for key in kept}


def _array(tensor: Tensor) -> Any:
    """A tensor as numpy has it, which knows no bfloat16."""
    return tensor.float().numpy()


def _write(path: Path, content: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a file, or nothing: of torch.save, of pickle or of safetensors, by its suffix."""
    with replacing(path) as staged, writing(path):
        if path.suffix == ".safetensors":
            save_file(content.get("model", content), staged, {"format": "pt", **(metadata or {})})
        elif path.suffix == ".pkl":
            staged.write_bytes(pickle.dumps(content))
        else:
            write_file(content, staged)
