"""Towers of an image-text model as programs that run without this project.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E embedding dimension.
"""

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...common.errors import UserError
from ...common.files import check_free, replacing, writing

Format = Literal["torch_export", "onnx", "onnx_int8"]
_SUFFIXES = {"torch_export": ".pt2", "onnx": ".onnx", "onnx_int8": ".onnx"}
LAYOUTS = {
    "torch_export": "a folder with image.pt2 and text.pt2, reparameterized, for torch.export.load",
    "onnx": "a folder with image.onnx and text.onnx, reparameterized; needs the extra 'onnx'",
    "onnx_int8": "the same with int8 weights of matrices, quantized by ONNX Runtime",
}
"""Description of each format."""
_TRACED = 2  # batch size
_CHECKED = (1, 3)  # batch sizes
_MAX_ERROR = 1e-4  # of exported features in float32
_MIN_COSINE = 0.9995  # of exported features in half precision
_ONE_FILE = 1.9e9  # bytes of weights; an ONNX file holds at most 2 GiB


class Tower(NamedTuple):
    """A tower with the inputs that it is traced with and checked on.

    Attributes:
        name: "image" or "text".
        module: takes the inputs in their order, and returns features [B, E].
        inputs: six rows of each input, by name, float32 or int64 [6, ...].
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]


def write_programs(
    towers: Sequence[Tower],
    folder: str | Path,
    format: Format,
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> list[Path]:
    """Write towers as programs for batches of any size, `config.json`, and the tokenizer, atomically.

    The written programs are loaded and compared with the towers (ONNX only if onnxruntime is installed).

    Args:
        towers: in eval mode, with weights in one precision.
        folder: a new or an empty folder.
        format: "torch_export" writes `image.pt2` and `text.pt2` for `torch.export.load`; "onnx" writes `image.onnx`
            and `text.onnx`, and a file with the weights of a tower of more than 2 GB; "onnx_int8" the same, with int8
            weights of matrices.
        config: plain data for `config.json` beside the programs' inputs, outputs and versions.
        tokenizer: as `padding_tokenizer` returns it.

    Returns:
        The files.

    Raises:
        UserError: If the folder exists and is not empty, there is no such format, or not in this precision, the
            libraries for ONNX are not installed, or the programs' features differ from the towers'.
        OSError: If the files cannot be written.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    traced = [_trace(tower) for tower in towers]
    dtype = traced[0].expected[0].dtype
    _check_format(format, dtype)
    described = {tower.name: _described(tower, format) for tower in traced}
    config = {**config, "format": format, "dtype": _name(dtype), "towers": described, "versions": _versions(format)}
    with writing(target):  # names the target if its folder is a file
        target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as staged:
        staged.mkdir()
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(str(staged / "tokenizer.json"))
        for tower in traced:
            path = staged / f"{tower.name}{_SUFFIXES[format]}"
            with _quiet():
                _write(tower, path, target)
                _check(tower, _load(path))
                if format == "onnx_int8":
                    _quantize(path)
    return sorted(target.iterdir())


def padding_tokenizer(text: str, length: int, pad: int) -> Tokenizer:
    """Return a tokenizer that cuts and pads each text to a fixed number of tokens.

    Args:
        text: the tokenizer as JSON text of the `tokenizers` library.
        length: number of tokens L.
        pad: id of the token to pad with.
    """
    tokenizer = Tokenizer.from_str(text)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=pad, pad_token=tokenizer.id_to_token(pad))
    return tokenizer


def example_images(size: int) -> Tensor:
    """Return six images [6, 3, S, S] of colored squares; features of noise images are too similar."""
    rows = _TRACED + sum(_CHECKED)
    return F.interpolate(torch.rand(rows, 3, 4, 4, generator=torch.Generator().manual_seed(0)), size)


def example_texts(length: int, vocabulary: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask of six texts [6, L] of two to L tokens: start, words, end, and zeros as padding."""
    rows = _TRACED + sum(_CHECKED)
    ids = torch.randint(1, vocabulary - 2, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[:, 0] = start
    for row, filled, last in zip(ids, mask, torch.linspace(1, length - 1, rows).long().tolist(), strict=True):
        row[last] = end
        row[last + 1 :] = 0
        filled[last + 1 :] = 0
    return ids, mask


class _Traced(NamedTuple):
    """A tower with its inputs and outputs.

    Attributes:
        name: "image" or "text".
        module: the tower.
        example: inputs that it is traced with.
        batches: inputs that its program is checked on.
        expected: features of each of `batches`.
    """

    name: str
    module: nn.Module
    example: dict[str, Tensor]
    batches: list[dict[str, Tensor]]
    expected: list[Tensor]


@torch.no_grad()
def _trace(tower: Tower) -> _Traced:
    counts = [_TRACED, *_CHECKED]
    split = {name: rows.split(counts) for name, rows in tower.inputs.items()}
    example, *batches = ({name: rows[index] for name, rows in split.items()} for index in range(len(counts)))
    return _Traced(tower.name, tower.module, example, batches, [tower.module(*batch.values()) for batch in batches])


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


def _write(tower: _Traced, path: Path, target: Path) -> None:
    rows = Dim("batch")
    # Strict tracing would interpret the bytecode of timm and open_clip without a benefit.
    program = torch.export.export(
        tower.module, tuple(tower.example.values()), dynamic_shapes=[{0: rows} for _ in tower.example], strict=False
    )
    if path.suffix == ".pt2":
        with writing(target):
            torch.export.save(program, path)
        return
    converted = torch.onnx.export(
        program,
        dynamo=True,
        input_names=list(tower.example),
        output_names=[f"{tower.name}_features"],
        dynamic_shapes=[{0: "batch"} for _ in tower.example],
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
    names = [given.name for given in session.get_inputs()]
    return lambda *inputs: torch.from_numpy(
        session.run(None, {name: rows.numpy() for name, rows in zip(names, inputs, strict=True)})[0]
    )


@torch.no_grad()
def _check(tower: _Traced, run: Callable[..., Tensor] | None) -> None:
    """Compare features on batches of other sizes than the traced one."""
    if run is None:
        return
    for batch, expected in zip(tower.batches, tower.expected, strict=True):
        features = run(*batch.values())
        if expected.dtype == torch.float32:
            limit = _MAX_ERROR * max(1.0, float(expected.abs().max()))
            error = float((features - expected).abs().max())
            good = error <= limit
            bound = f"a difference of at most {limit:.1e}"
            value = f"{error:.1e}"
        else:
            cosine = float(F.cosine_similarity(features.float(), expected.float()).min())
            good = cosine >= _MIN_COSINE
            bound = f"a cosine of at least {_MIN_COSINE}"
            value = f"{cosine:.4f}"
        if not good:
            raise UserError(
                f"Expected {bound} between the model and the exported {tower.name} tower, got {value} on a batch of "
                f"{len(expected)}: nothing is written; try another format, or another release of torch."
            )


def _described(tower: _Traced, format: str) -> dict[str, Any]:
    """Return the configuration's entry of a tower."""

    def tensor(name: str, like: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": ["batch", *like.shape[1:]], "dtype": _name(like.dtype)}

    return {
        "file": f"{tower.name}{_SUFFIXES[format]}",
        "inputs": [tensor(name, rows) for name, rows in tower.example.items()],
        "output": tensor(f"{tower.name}_features", tower.expected[0]),
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
