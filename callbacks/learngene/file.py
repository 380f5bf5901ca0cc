"""A learngene in one file: initial weights for descendants of a CLIP, and their origin.

The file is safetensors. Names and shapes of its tensors follow from the rule of its method (`Rule.shapes`); all methods
share those of a tower's ends: `vision.*`, `text.*` and `logit_scale`, by open_clip's names.

Its metadata has one entry, `learngene`, a manifest in JSON.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...common.errors import UserError
from ...common.files import replacing, writing
from .layers import rule_of
from .sizes import LearngeneSizes, Shapes

Storage = Literal["float32", "float16"]

FILE_NAME = "learngene.safetensors"
"""Name of the file in a run's folder."""

_ENTRY = "learngene"
_VERSION = 2


class MissingLearngene(UserError):
    """The file does not exist."""


@dataclasses.dataclass(frozen=True)
class Learngene:
    """Initial weights for descendants, and their origin.

    Args:
        tensors: float32, by their names in the file.
        sizes: of the network that the learngene was extracted from.
        method: method whose rule expands the learngene.
        teacher: name, weights and sha256 of the teacher; None for a training without one.
        data: plain data that describes the training data.
        step: number of optimizer steps of the extraction.
        preprocessing: plain data that describes how evaluation prepared an image during the extraction.
    """

    tensors: dict[str, Tensor]
    sizes: LearngeneSizes
    method: str
    teacher: dict[str, str] | None = None
    data: dict[str, Any] | None = None
    step: int | None = None
    preprocessing: dict[str, Any] | None = None


def save_learngene(learngene: Learngene, path: str | Path, storage: Storage = "float32") -> None:
    """Write a learngene to a file, atomically.

    Args:
        learngene: what to write.
        path: path of the file.
        storage: "float16" halves the file: matrices are rounded to float16, vectors and scalars stay in float32.

    Raises:
        UserError: If the path is a folder, the tensors are not those of the sizes or non-finite in that precision, or
            the file cannot be written.
    """
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise UserError(f"Expected the name of a file, got the folder {str(path)!r}: name a file in it.")
    rule = rule_of(learngene.method)
    _check(learngene.tensors, rule.shapes(learngene.sizes), "the learngene to be written")
    kept = {name: _stored(tensor, storage) for name, tensor in learngene.tensors.items()}
    non_finite = [name for name, tensor in kept.items() if not bool(torch.isfinite(tensor).all())]
    if non_finite:
        raise UserError(
            f"Expected finite values in {storage}, got non-finite values in {non_finite[0]}: nothing was written; "
            "store the learngene in float32 if it is finite there."
        )
    manifest = {
        "version": _VERSION,
        "method": learngene.method,
        "rule": type(rule).__module__,
        "sizes": dataclasses.asdict(learngene.sizes),
        "teacher": learngene.teacher,
        "data": learngene.data,
        "step": learngene.step,
        "preprocessing": learngene.preprocessing,
        "storage": storage,
    }
    with replacing(target) as staged, writing(target):
        save_file(kept, staged, {_ENTRY: json.dumps(manifest, default=str), "format": "pt"})


def load_learngene(path: str | Path) -> Learngene:
    """Read a learngene from a file.

    Args:
        path: path of a file that `save_learngene` has written, or a folder: that of a run, or of all runs of a name.
            The newest `learngene.safetensors` below a folder is read.

    Returns:
        The learngene, in float32.

    Raises:
        MissingLearngene: If there is no such file.
        UserError: If the file cannot be read or is of another kind, version or method, or its tensors do not fit its
            sizes.
    """
    source = Path(path).expanduser()
    if source.is_dir():
        source = max(source.rglob(FILE_NAME), key=lambda file: file.stat().st_mtime, default=source)
    if not source.is_file():
        raise MissingLearngene(
            f"Expected a learngene file that LearngeneWriter wrote, found none at {str(path)!r}: correct the path."
        )
    try:
        with safe_open(source, "pt") as file:
            text = (file.metadata() or {}).get(_ENTRY)
            tensors = {name: file.get_tensor(name).float() for name in file.keys()} if text else {}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(
            f"Expected a safetensors file, but {str(path)!r} cannot be read ({error}): it is damaged or of another "
            "kind, get it again."
        ) from error
    if text is None:
        raise UserError(
            f"Expected a learngene file that LearngeneWriter wrote, got {str(path)!r} without a learngene's manifest: "
            "give another file."
        )
    manifest: dict[str, Any] = json.loads(text)
    if manifest["version"] != _VERSION:
        raise UserError(
            f"Expected version {_VERSION} of the learngene format, got version {manifest['version']} in {str(path)!r}: "
            "read it with the version of vlightning that wrote it."
        )
    sizes = LearngeneSizes(**manifest["sizes"])
    method = manifest["method"]
    _check(tensors, rule_of(method, manifest["rule"]).shapes(sizes), repr(str(path)))
    teacher, data, step = (manifest[name] for name in ("teacher", "data", "step"))
    return Learngene(tensors, sizes, method, teacher, data, step, manifest.get("preprocessing"))


def _stored(tensor: Tensor, storage: Storage) -> Tensor:
    matrix = tensor.dim() > 1
    return tensor.detach().cpu().to(torch.float16 if storage == "float16" and matrix else torch.float32).contiguous()


def _check(tensors: Mapping[str, Tensor], expected: Shapes, source: str) -> None:
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = [
        f"{len(names)} {what} ({names[0]}{', ...' if len(names) > 1 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise UserError(
            f"Expected the tensors of its sizes in {source}, got {' and '.join(problems)}: extract the learngene again."
        )
