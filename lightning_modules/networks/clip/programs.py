"""Export of the two towers of an image-text model as programs that run without this project.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E embedding dimension.
"""

import contextlib
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
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ....common.clip_vocabulary import CLIP_VOCABULARY, clip_tokenizer_json
from ....common.errors import UserError
from ....common.files import check_free, replacing, writing
from .towers import towers

Format = Literal["torch_export", "onnx", "onnx_int8"]
_SUFFIXES = {"torch_export": ".pt2", "onnx": ".onnx", "onnx_int8": ".onnx"}
PROGRAMS = tuple(_SUFFIXES)
"""Names of the formats."""
_TRACED, _CHECKED = 2, (1, 3)  # batch sizes
_MAX_ERROR, _MIN_COSINE = 1e-4, 0.9995  # of exported features, in float32 and in half precision
_ONE_FILE = 1.9e9  # bytes of weights; an ONNX file holds at most 2 GiB


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
    """Write both towers as programs for batches of any size, `config.json`, and CLIP's tokenizer, atomically.

    Inputs are float32 images and int64 token ids; features have the precision of the weights. The written programs are
    loaded and compared with the towers (ONNX only if onnxruntime is installed). `tokenizer.json` is for the `tokenizers`
    library, and pads and cuts texts to the context length; a model with another vocabulary has none.

    Args:
        model: as in `towers`.
        folder: a new or an empty folder.
        format: "torch_export" writes `image.pt2` and `text.pt2` for `torch.export.load`; "onnx" writes `image.onnx`
            and `text.onnx`, and a file with the weights of a tower of more than 2 GB; "onnx_int8" the same, with int8
            weights of matrices.
        image_size: S.
        fused: as in `towers`.
        normalize: as in `towers`.
        dtype: as in `towers`: float32, float16 or, for "torch_export", bfloat16. On x86, onnxruntime may crash on
            float16 unless its optimization stops at ORT_ENABLE_EXTENDED.
        preprocessing: record of the image preprocessing for the configuration, plain data.

    Returns:
        The files.

    Raises:
        UserError: if the folder exists and is not empty, there is no such format, or not in this precision, the
            libraries for ONNX are not installed, the model takes no images of this size, or the programs' features
            differ from the towers'.
        OSError: if the files cannot be written.
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
    with writing(target):  # names the target if its folder is a file
        target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as staged:
        staged.mkdir()
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if model.vocab_size == CLIP_VOCABULARY:
            _padding_tokenizer(model.context_length).save(str(staged / "tokenizer.json"))
        for part in parts:
            path = staged / f"{part.name}{_SUFFIXES[format]}"
            with _quiet():
                _write(part, path, target)
                _check(part, _load(path))
                if format == "onnx_int8":
                    _quantize(path)
    return sorted(target.iterdir())


def _padding_tokenizer(length: int) -> Tokenizer:
    """Return CLIP's tokenizer, which returns `length` ids of each text, padded with zeros as open_clip's does."""
    tokenizer = Tokenizer.from_str(clip_tokenizer_json())
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=0, pad_token="!")
    return tokenizer


class _Part(NamedTuple):
    """A tower with the batches that it is traced with and checked on."""

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
        raise UserError(
            f"Expected the image size that the model was built for, got {inputs.shape[-1]} pixels "
            f"({str(error).rstrip('.')}): correct image_size."
        ) from error
    return _Part(name, tower, input_name, example, batches, expected)


def _check_format(format: str, dtype: torch.dtype) -> None:
    if format not in _SUFFIXES:
        raise UserError(f"Expected the format {' or '.join(_SUFFIXES)}, got {format!r}.")
    if format == "torch_export":
        return
    if dtype != torch.float32 and format == "onnx_int8":
        raise UserError(f"Expected float32 for the format onnx_int8, got {_name(dtype)}: leave dtype out.")
    if dtype == torch.bfloat16:
        raise UserError(
            "Expected float32 or float16, got bfloat16, which ONNX's convolutions do not support: choose another "
            "precision, or the format torch_export."
        )
    needed = ("onnx", "onnxscript", *(["onnxruntime"] if format == "onnx_int8" else []))
    missing = [library for library in needed if find_spec(library) is None]
    if missing:
        raise UserError(
            f"Expected {' and '.join(missing)} for the format {format}, found no such library: install it with "
            '`pip install "vlightning[onnx]"`.'
        )


def _write(part: _Part, path: Path, target: Path) -> None:
    batch = {part.input_name: {0: Dim("batch")}}
    # Strict tracing would interpret the bytecode of timm and open_clip without a benefit.
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


def _quantize(path: Path) -> None:
    """Replace the matrices of an ONNX file by int8 weights with a scale for each column; convolutions stay float32.

    Activations are quantized when the program runs (dynamic quantization).
    """
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    made = path.with_name(f"{path.stem}.int8.onnx")
    quantization.quantize_dynamic(
        path,
        made,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    made.replace(path)


def _load(path: Path) -> Callable[[Tensor], Tensor] | None:
    """Return a function that runs a file; None if no library here can."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    if find_spec("onnxruntime") is None:
        return None
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    # The next level crashes on float16 on x86: microsoft/onnxruntime#28392.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])


@torch.no_grad()
def _check(part: _Part, run: Callable[[Tensor], Tensor] | None) -> None:
    """Compare features on batches of other sizes than the traced one."""
    if run is None:
        return
    for batch, expected in zip(part.batches, part.expected, strict=True):
        found = run(batch)
        if expected.dtype == torch.float32:
            error, limit = float((found - expected).abs().max()), _MAX_ERROR * max(1.0, float(expected.abs().max()))
            good, bound, value = error <= limit, f"a difference of at most {limit:.1e}", f"{error:.1e}"
        else:
            cosine = float(F.cosine_similarity(found.float(), expected.float()).min())
            good, bound, value = cosine >= _MIN_COSINE, f"a cosine of at least {_MIN_COSINE}", f"{cosine:.4f}"
        if not good:
            raise UserError(
                f"Expected {bound} between the model and the exported {part.name} tower, got {value} on a batch of "
                f"{len(batch)}: nothing is written; try another format, or another release of torch."
            )


def _images(count: int, size: int) -> Tensor:
    """Return colored squares [B, 3, S, S]; features of noise images are too similar."""
    return F.interpolate(torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0)), size)


def _texts(count: int, length: int, vocabulary: int) -> Tensor:
    """Return start, words, end and zeros [B, L]; CLIP's start and end are its highest ids."""
    ids = torch.randint(1, vocabulary - 2, (count, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = vocabulary - 2
    for row, last in zip(ids, torch.linspace(1, length - 1, count).long().tolist(), strict=True):
        row[last] = vocabulary - 1
        row[last + 1 :] = 0
    return ids


def _described(part: _Part, format: str) -> dict[str, Any]:
    """Return the configuration's entry of a tower."""

    def tensor(name: str, like: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": ["batch", *like.shape[1:]], "dtype": _name(like.dtype)}

    return {
        "file": f"{part.name}{_SUFFIXES[format]}",
        "input": tensor(part.input_name, part.example),
        "output": tensor(f"{part.name}_features", part.expected[0]),
    }


def _versions(format: str) -> dict[str, str]:
    libraries = ["vlightning", "torch", "timm", "open_clip_torch"]
    if format != "torch_export":
        libraries += ["onnx", "onnxscript", *(["onnxruntime"] if format == "onnx_int8" else [])]
    return {name: version(name) for name in libraries}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(program: ExportedProgram) -> int:
    return sum(tensor.nbytes for tensor in program.state_dict.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' progress, hints and warnings; errors are raised."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
