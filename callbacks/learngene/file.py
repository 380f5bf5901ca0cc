"""A learngene in one file: what every descendant of a CLIP starts from, and what it is of.

The file is safetensors. Its tensors have the names of the auxiliary's parameters, for MM-LG:

    blocks.{vision, text, multimodal}.{1, 2}.{qkv, proj, fc1, fc2}.{weight, bias}    what layers are summed of
    coefficients.{vision, vision_multimodal, text, text_multimodal}                  [pairs] each
    norms.{vision, text}.{norm1, norm2}.{weight, bias}                               shared by a tower's layers
    vision.*, text.*, logit_scale                                                    loaded directly; open_clip's names

TLEG has `blocks.{vision, text}.{base, slope}.*` with the norms among them, and the last line. He-LG has only
`layers.{vision, text}.{0, 1, 2}.*`.

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

from ...common.files import replacing, writing
from .layers import GROUPS, KINDS, LAST, NORMS, TERMS, TOWERS, Method

Storage = Literal["float32", "float16"]

_ENTRY, _VERSION = "learngene", 1
_Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class LearngeneSizes:
    """Of the auxiliary; the defaults are the paper's ViT-S/16 with a text tower of the same width.

    Attributes:
        width: Values of a token, in both towers, which share blocks.
        heads: Of the attention, in both towers.
        layers: Of each tower.
        embed_dim: Values of a feature.
        image_size: Side of the square images, pixels.
        patch_size: Side of their patches, pixels.
        max_tokens: Length of the token sequences.
        vocab_size: Number of tokens.
    """

    width: int = 384
    heads: int = 6
    layers: int = 12
    embed_dim: int = 384
    image_size: int = 224
    patch_size: int = 16
    max_tokens: int = 77
    vocab_size: int = 49408

    def __post_init__(self) -> None:
        """Checks that they fit together.

        Raises:
            ValueError: If they do not.
        """
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}: give a number of at least 1.")
        if self.width % self.heads:
            raise ValueError(f"A width of {self.width} does not divide into {self.heads} heads: change one of them.")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"Images of {self.image_size} pixels do not divide into patches of {self.patch_size}: change one."
            )

    @property
    def pairs(self) -> int:
        """Distinct layers of each tower, in MM-LG.

        Raises:
            ValueError: If there is an odd one.
        """
        if self.layers % 2:
            raise ValueError(f"layers is {self.layers}, but layers come in pairs: give an even number.")
        return self.layers // 2

    def shapes(self, method: Method = "MM-LG") -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in the file of a method, by name."""
        whole = {**self._linears(), **self._norms()}
        if method == "He-LG":
            return _named(whole, [f"layers.{tower}.{layer}" for tower in TOWERS for layer in range(LAST)])
        if method == "TLEG":
            return _named(whole, [f"blocks.{tower}.{term}" for tower in TOWERS for term in TERMS]) | self._ends()
        shapes = _named(self._linears(), [f"blocks.{kind}.{group}" for kind in KINDS for group in GROUPS])
        shapes |= _named(self._norms(), [f"norms.{tower}" for tower in TOWERS])
        for tower in TOWERS:
            shapes |= {f"coefficients.{tower}": (self.pairs,), f"coefficients.{tower}_multimodal": (self.pairs,)}
        return shapes | self._ends()

    def _linears(self) -> _Shapes:
        width = self.width
        rows = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (4 * width, width), "fc2": (width, 4 * width)}
        found: _Shapes = {}
        for name, shape in rows.items():
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return found

    def _norms(self) -> _Shapes:
        return {f"{name}.{end}": (self.width,) for name in NORMS for end in ("weight", "bias")}

    def _ends(self) -> _Shapes:
        """What a tower has before and after its layers, and the scale."""
        width, embed = self.width, self.embed_dim
        patches = (self.image_size // self.patch_size) ** 2
        return {
            "vision.class_embedding": (width,),
            "vision.positional_embedding": (patches + 1, width),
            "vision.conv1.weight": (width, 3, self.patch_size, self.patch_size),
            **_norm("vision.ln_pre", width),
            **_norm("vision.ln_post", width),
            "vision.proj": (width, embed),
            "text.token_embedding.weight": (self.vocab_size, width),
            "text.positional_embedding": (self.max_tokens, width),
            **_norm("text.ln_final", width),
            "text.text_projection": (width, embed),
            "logit_scale": (1,),
        }


def _named(shapes: _Shapes, prefixes: list[str]) -> _Shapes:
    return {f"{prefix}.{name}": shape for prefix in prefixes for name, shape in shapes.items()}


def _norm(name: str, width: int) -> _Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


@dataclasses.dataclass(frozen=True)
class Learngene:
    """What descendants start from.

    Attributes:
        tensors: By the names in the file, float32.
        sizes: Of the auxiliary.
        teacher: Name, weights and sha256 of what it was distilled from; None for a plain training.
        data: What it was trained on, plain data.
        step: Optimizer steps of its training.
        method: Whose rules expand it.
        preprocessing: What evaluation did to an image in its training, plain data.
    """

    tensors: dict[str, Tensor]
    sizes: LearngeneSizes
    teacher: dict[str, str] | None = None
    data: dict[str, Any] | None = None
    step: int | None = None
    method: Method = "MM-LG"
    preprocessing: dict[str, Any] | None = None


def save_learngene(learngene: Learngene, path: str | Path, storage: Storage = "float32") -> None:
    """Writes a learngene into a file; all of it, or what was there stays.

    Args:
        learngene: What to write.
        path: Of the file.
        storage: "float16" halves the file: matrices are rounded to 11 bits. Vectors and numbers stay as they are.

    Raises:
        ValueError: If its tensors are not those of its sizes, or not finite in that precision.
        IsADirectoryError: If there is a folder of that name.
        OSError: If the file cannot be written.
    """
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise IsADirectoryError(f"Found a folder {str(path)!r}, expected the name of a file: name one in it.")
    _check(learngene.tensors, learngene.sizes.shapes(learngene.method), "the learngene to be written")
    kept = {name: _stored(tensor, storage) for name, tensor in learngene.tensors.items()}
    infinite = [name for name, tensor in kept.items() if not bool(torch.isfinite(tensor).all())]
    if infinite:
        raise ValueError(f"Found values of {infinite[0]} that are not finite in {storage}: nothing was written.")
    manifest = {
        "version": _VERSION,
        "method": learngene.method,
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
    """Reads a learngene.

    Args:
        path: Of a file that `save_learngene` has written.

    Returns:
        It, in float32 whatever it was stored in.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If it cannot be read.
        ValueError: If it is of another kind or version, or tensors are missing, left over or of another shape.
    """
    source = Path(path).expanduser()
    if not source.is_file():
        raise FileNotFoundError(
            f"Found no learngene file {str(path)!r}, expected one that LearngeneWriter has written: correct the path."
        )
    try:
        with safe_open(source, "pt") as file:
            text = (file.metadata() or {}).get(_ENTRY)
            tensors = {name: file.get_tensor(name).float() for name in file.keys()} if text else {}  # noqa: SIM118
    except SafetensorError as error:
        raise RuntimeError(
            f"The learngene file {str(path)!r} cannot be read ({error}): it is damaged or of another kind, get it "
            "again."
        ) from error
    if text is None:
        raise ValueError(
            f"Found no manifest of a learngene in {str(path)!r}, expected a file that LearngeneWriter has written: "
            "give that."
        )
    manifest: dict[str, Any] = json.loads(text)
    if manifest["version"] != _VERSION:
        raise ValueError(
            f"Found version {manifest['version']} of the learngene format in {str(path)!r}, expected {_VERSION}: read "
            "it with the version of this package that wrote it."
        )
    sizes, method = LearngeneSizes(**manifest["sizes"]), manifest["method"]
    _check(tensors, sizes.shapes(method), repr(str(path)))
    teacher, data, step = (manifest[name] for name in ("teacher", "data", "step"))
    return Learngene(tensors, sizes, teacher, data, step, method, manifest.get("preprocessing"))


def _stored(tensor: Tensor, storage: Storage) -> Tensor:
    matrix = tensor.dim() > 1
    return tensor.detach().cpu().to(torch.float16 if storage == "float16" and matrix else torch.float32).contiguous()


def _check(tensors: Mapping[str, Tensor], expected: _Shapes, source: str) -> None:
    missing, left = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = [
        f"{len(names)} {what} ({names[0]}{', ...' if len(names) > 1 else ''})"
        for what, names in (("missing", missing), ("left over", left), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise ValueError(
            f"Found tensors in {source} that are {' and '.join(problems)}, expected those of its sizes: extract the "
            "learngene again."
        )
