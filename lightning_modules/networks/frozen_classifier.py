"""Loading a trained network that stays as it is: a teacher, or the backbone of a linear probe."""

import re
from pathlib import Path

import torch

from ..base.frozen import FrozenTeacher
from .cifar import Classifier
from .classifier_files import load_classifier, public_state, read_classifier
from .classifiers import build_classifier, public_network

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def load_frozen(frozen: FrozenTeacher[Classifier], name: str, source: str | None, classes: int) -> None:
    """Give a frozen network its weights, unless it has them, and record where they come from.

    Args:
        frozen: what to fill.
        name: of its network.
        source: a file; the folder of a run, whose newest last checkpoint is taken; or the name of the library's own
            weights.
        classes: number of its classes.

    Raises:
        FileNotFoundError: if there is no such file; the sentence says what to run.
        ValueError: if no source was given, it is of another network or another number of classes, or a checkpoint was
            restored that was trained with other weights.
    """
    if frozen.origin is not None:
        return
    role = frozen.role
    if source is None:
        raise ValueError(f"There are no weights of the {role} {name}: give {frozen.argument}, or {_recipe(role, name)}")
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
        raise FileNotFoundError(f"Found no trained {role} in {source!r}: {_recipe(role, name, source)}")
    load_classifier(network, public_state(frozen.network, read_classifier(path)), f"the {role} file {str(path)!r}")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values()):
        raise ValueError(f"Found infinite or undefined weights in the {role} file {str(path)!r}: train it again.")
    frozen.record(name, str(path))


def _is_file_name(source: str) -> bool:
    return "/" in source or Path(source).suffix != "" or Path(source).exists()


def _recipe(role: str, name: str, source: str | None = None) -> str:
    """What to run for such weights: the command of the shipped config that writes them, or trains such a network."""
    commands = {}
    for file in sorted(CONFIGS.glob("*/*teacher*.yaml")):  # CoCoRD's come first
        text = file.read_text(encoding="utf-8")
        command = re.search(r"^# +(vlightning fit .*)$", text, re.MULTILINE)
        folder, network = (re.search(rf"^ +{key}: (\S+)$", text, re.MULTILINE) for key in ("name", "student"))
        if command and folder and network:
            commands[folder[1]] = command[1]
            commands.setdefault(network[1], command[1])
    command_line = next((commands[part] for part in Path(source or "").parts if part in commands), commands.get(name))
    command_line = command_line or (
        f"vlightning fit --config configs/cocord/base.yaml --config configs/cocord/vanilla.yaml --model.student {name}"
    )
    return f"train the {role} first with `{command_line}`, or name another file."
