"""The two towers of an image-text model by themselves, and as files that run without this project.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E features.
"""

import contextlib
import copy
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from open_clip import CLIP, CustomTextCLIP
from open_clip.transformer import LayerNormFp32
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...common.files import check_free, replacing, writing
from ..networks.precision import unit
from .reparameterize import reparameterize

Format = Literal["torch_export", "onnx"]
_SUFFIXES = {"torch_export": ".pt2", "onnx": ".onnx"}
_TRACED, _CHECKED = 2, (1, 3)  # batch sizes
_MAX_ERROR, _MIN_COSINE = 1e-4, 0.9995  # of what was written, in float32 and in half precision
_ONE_FILE = 1.9e9  # bytes of weights; ONNX's format ends at 2 GiB


class ImageTower(nn.Module):
    """Images to features.

    Args:
        visual: the image tower of an open_clip model.
        normalize: whether features get unit length.
    """

    def __init__(self, visual: nn.Module, normalize: bool) -> None:
        super().__init__()
        self.visual = visual
        self.normalize = normalize

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, S, S], normalised, in any precision, to [B, E] in that of the weights."""
        features: Tensor = self.visual(image.to(next(self.parameters()).dtype))
        return unit(features).to(features.dtype) if self.normalize else features


class TextTower(nn.Module):
    """Token ids to features.

    Args:
        model: an open_clip model, whose image tower is not used.
        normalize: whether features get unit length.
    """

    def __init__(self, model: nn.Module, normalize: bool) -> None:
        super().__init__()
        self.model = model
        self.normalize = normalize

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, L] to [B, E] in the precision of the weights."""
        features: Tensor = self.model.encode_text(input_ids)  # type: ignore[operator]
        return unit(features).to(features.dtype) if self.normalize else features


def towers(
    model: CLIP | CustomTextCLIP, fused: bool = True, normalize: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[ImageTower, TextTower]:
    """Copies of a trained model's towers, in eval mode and without gradients.

    Args:
        model: to be fused it must be in eval mode.
        fused: whether branches and norms become convolutions, as in `reparameterize`.
        normalize: whether features get unit length.
        dtype: of weights and features; fusing is done before rounding.

    Raises:
        TypeError: if it is another kind of model.
        ValueError: if it is to be fused and in train mode.
    """
    if type(model) not in (CLIP, CustomTextCLIP):
        raise TypeError(
            f"Found a {type(model).__name__}, expected open_clip's CLIP or CustomTextCLIP, which are an image and a "
            "text tower and nothing else."
        )
    both: Any = reparameterize(model) if fused else copy.deepcopy(model).eval().requires_grad_(False)
    for module in both.modules():
        if type(module) is LayerNormFp32:
            # It casts its input and not its weights; torch's own computes half precision in float32 anyway.
            module.__class__ = nn.LayerNorm
    both.to(dtype)
    image = ImageTower(both.visual, normalize)
    del both.visual, both.logit_scale
    both.logit_bias = None
    return image.eval(), TextTower(both, normalize).eval()


def export_towers(
    model: CLIP | CustomTextCLIP,
    folder: str | Path,
    format: Format,
    image_size: int,
    fused: bool = True,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
    preprocessing: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write both towers as programs for batches of any size, and `config.json`; all of it or nothing.

    Images go in as float32 whatever the precision of the weights, token ids as int64; features come out in the
    weights' precision. What was written is read back and compared with the towers, ONNX files if onnxruntime is there.

    Args:
        model: as in `towers`.
        folder: a new or an empty one.
        format: "torch_export" writes `image.pt2` and `text.pt2` for `torch.export.load`; "onnx" writes `image.onnx`
            and `text.onnx`, and beside a tower of more than 2 GB a file with its weights.
        image_size: S.
        fused: as in `towers`.
        normalize: as in `towers`.
        dtype: as in `towers`: float32, float16 or, for "torch_export", bfloat16. On x86, onnxruntime may crash on
            float16 unless its optimization stops at ORT_ENABLE_EXTENDED.
        preprocessing: what the configuration is to say of how images are made ready; plain data.

    Returns:
        The files.

    Raises:
        FileExistsError: if there is something of that name already.
        ModuleNotFoundError: if the libraries for ONNX are not there.
        ValueError: if there is no such format, or none in this precision, or the model takes no images of this size.
        OSError: if the files cannot be written.
        RuntimeError: if they give other features than the towers.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    _check_format(format, dtype)
    image, text = (tower.cpu() for tower in towers(model, fused, normalize, dtype))
    count = _TRACED + sum(_CHECKED)
    parts = [
        _part(image, "image", "image", _images(count, image_size)),
        _part(text, "text", "input_ids", _texts(count, model.context_length, model.vocab_size)),
    ]
    config = {
        "class": type(model).__name__,
        "format": format,
        "dtype": _name(dtype),
        "fused": fused,
        "normalize": normalize,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "towers": {part.name: _described(part, format) for part in parts},
        "preprocessing": dict(preprocessing or {}),
        "versions": _versions(format),
    }
    with replacing(target) as staged:
        staged.mkdir()
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for part in parts:
            path = staged / f"{part.name}{_SUFFIXES[format]}"
            with _quiet():
                _write(part, path, target)
                _check(part, _load(path))
    return sorted(target.iterdir())


class _Part(NamedTuple):
    """A tower with what it is traced with and checked on."""

    name: str
    tower: nn.Module
    input_name: str
    example: Tensor
    batches: list[Tensor]
    expected: list[Tensor]


@torch.no_grad()
def _part(tower: nn.Module, name: str, input_name: str, inputs: Tensor) -> _Part:
    example, *batches = inputs.split([_TRACED, *_CHECKED])
    try:
        expected = [tower(batch) for batch in batches]
    except (AssertionError, RuntimeError) as error:
        if name != "image":
            raise
        raise ValueError(
            f"The image tower does not take images of {inputs.shape[-1]} pixels ({str(error).rstrip('.')}): give the "
            "image_size that the model was made for."
        ) from error
    return _Part(name, tower, input_name, example, batches, expected)


def _check_format(format: str, dtype: torch.dtype) -> None:
    if format not in _SUFFIXES:
        raise ValueError(f"Found the format {format!r}, expected {' or '.join(_SUFFIXES)}.")
    if format != "onnx":
        return
    if dtype == torch.bfloat16:
        raise ValueError(
            "Found bfloat16 for ONNX, whose convolutions do not know it: write float32 or float16, or the format "
            "torch_export."
        )
    missing = [library for library in ("onnx", "onnxscript") if find_spec(library) is None]
    if missing:
        raise ModuleNotFoundError(
            f"Found no {' and no '.join(missing)}, which the format onnx is written with: install it with "
            '`pip install "vlightning[onnx]"`.'
        )


def _write(part: _Part, path: Path, target: Path) -> None:
    batch = {part.input_name: {0: Dim("batch")}}
    # Not strict: that goes through the bytecode of timm and open_clip, and gains nothing here.
    program = torch.export.export(part.tower, (part.example,), dynamic_shapes=batch, strict=False)
    if path.suffix == ".pt2":
        with writing(target):
            torch.export.save(program, path)
        return
    converted = torch.onnx.export(
        program,
        dynamo=True,
        input_names=[part.input_name],
        output_names=[f"{part.name}_features"],
        dynamic_shapes={part.input_name: {0: "batch"}},
    )
    assert converted is not None
    with writing(target):
        converted.save(path, external_data=_size(program) > _ONE_FILE)


def _load(path: Path) -> Callable[[Tensor], Tensor] | None:
    """What runs a file; None where nothing here can."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    if find_spec("onnxruntime") is None:
        return None
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    # One level more crashes on float16 on x86: microsoft/onnxruntime#28392.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])


@torch.no_grad()
def _check(part: _Part, run: Callable[[Tensor], Tensor] | None) -> None:
    """Compare on batches of other sizes than the traced one."""
    if run is None:
        return
    for batch, expected in zip(part.batches, part.expected, strict=True):
        found = run(batch)
        if expected.dtype == torch.float32:
            error, limit = float((found - expected).abs().max()), _MAX_ERROR * max(1.0, float(expected.abs().max()))
            good, said = error <= limit, f"by {error:.1e}, expected at most {limit:.1e}"
        else:
            cosine = float(F.cosine_similarity(found.float(), expected.float()).min())
            good, said = cosine >= _MIN_COSINE, f"with a cosine of {cosine:.4f}, expected at least {_MIN_COSINE}"
        if not good:
            raise RuntimeError(
                f"The exported {part.name} tower differs from the model on a batch of {len(batch)} {said}: nothing is "
                "written, try another format, or another release of torch."
            )


def _images(count: int, size: int) -> Tensor:
    """Squares of colours [B, 3, S, S]: to a tower, noise is always the same image."""
    return F.interpolate(torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0)), size)


def _texts(count: int, length: int, vocabulary: int) -> Tensor:
    """Start, words, end, and zeros [B, L]; CLIP's start and end are its highest ids."""
    ids = torch.randint(1, vocabulary - 2, (count, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = vocabulary - 2
    for row, last in zip(ids, torch.linspace(1, length - 1, count).long().tolist(), strict=True):
        row[last] = vocabulary - 1
        row[last + 1 :] = 0
    return ids


def _described(part: _Part, format: str) -> dict[str, Any]:
    """What the configuration says of a tower's file."""

    def tensor(name: str, like: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": ["batch", *like.shape[1:]], "dtype": _name(like.dtype)}

    return {
        "file": f"{part.name}{_SUFFIXES[format]}",
        "input": tensor(part.input_name, part.example),
        "output": tensor(f"{part.name}_features", part.expected[0]),
    }


def _versions(format: str) -> dict[str, str]:
    libraries = ["vlightning", "torch", "timm", "open_clip_torch"]
    return {name: version(name) for name in [*libraries, *(["onnx", "onnxscript"] if format == "onnx" else [])]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(program: ExportedProgram) -> int:
    return sum(tensor.nbytes for tensor in program.state_dict.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' progress, hints and warnings from the terminal; errors are raised."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
