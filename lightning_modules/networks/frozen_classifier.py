"""Load a trained classifier that stays frozen: a teacher, or the backbone of a linear probe."""

from pathlib import Path

import torch

from ...common.errors import UserError
from ..core.frozen import Frozen, reads_weights
from .cifar import Classifier
from .classifier_files import load_classifier_file
from .classifiers import build_classifier, public_network

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
        raise UserError(f"Expected a trained {role} in {source!r}, got no file: {_advice(name, source)}")
    load_classifier_file(frozen.network, path, f"the {role} file")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values()):
        raise UserError(
            f"Expected finite weights in the {role} file {str(path)!r}, got non-finite ones: train it again."
        )
    frozen.record(name, str(path))


def _is_file_name(source: str) -> bool:
    return "/" in source or Path(source).suffix != "" or Path(source).exists()


def _advice(name: str, source: str = "") -> str:
    """Return the command that trains a network: for the run `source`, or for any run of the network."""
    runs = [*Path(source).parts, f"cocord_teacher_{name.lower()}"]
    arguments = next((TRAINING[run] for run in runs if run in TRAINING), f"{_PLAIN} --model.student {name}")
    return f"train it first with `vlightning fit {arguments}`."
