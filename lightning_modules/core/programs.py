"""Towers of an image-text model as programs that run without this project.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E embedding dimension.
"""

import contextlib
import copy
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...common.errors import UserError
from ...common.files import check_free, replacing, writing
from ...common.messages import say
from . import converters, immich

_FILES = {
    "torch_export": {"image": "image.pt2", "text": "text.pt2"},
    "onnx": {"image": "image.onnx", "text": "text.onnx"},
    "onnx_int8": {"image": "image.onnx", "text": "text.onnx"},
    "immich": immich.FILES,
    "coreml": {"image": "image.mlpackage", "text": "text.mlpackage"},
    "executorch": {"image": "image.pte", "text": "text.pte"},
}
LAYOUTS = {
    "torch_export": "a folder with image.pt2 and text.pt2, reparameterized, for torch.export.load",
    "onnx": "a folder with image.onnx and text.onnx, reparameterized; needs the extra 'onnx'",
    "onnx_int8": "the same with int8 weights of matrices, quantized by ONNX Runtime",
    "immich": "a folder of ONNX programs that the photo server Immich reads as one of its models",
    "coreml": "a folder with image.mlpackage and text.mlpackage for Core ML, one row at a time; installs coremltools",
    "executorch": "a folder with image.pte and text.pte for ExecuTorch, one row at a time; installs executorch",
}
"""Description of each format."""
HALF = {"torch_export": ("float16", "bfloat16"), "onnx": ("float16",), "coreml": ("float16",)}
"""Half precisions of each format that has any."""
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
    format: str,
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Write towers as programs for batches of any size, `config.json`, and the tokenizer, atomically.

    The written programs are loaded and compared with the towers (ONNX only if onnxruntime is installed; of Core ML
    inputs, outputs and weights). Those for Core ML, ExecuTorch and Immich take one row at a time. How far the features
    of half precision are from those of the towers is printed.

    Args:
        towers: copies in eval mode, which are cast to the precision of the programs.
        folder: a new or an empty folder.
        format: "torch_export" writes `image.pt2` and `text.pt2` for `torch.export.load`; "onnx" writes `image.onnx`
            and `text.onnx`, and a file with the weights of a tower of more than 2 GB; "onnx_int8" the same, with int8
            weights of matrices; "immich" ONNX in the folders and with the names of Immich; "coreml" and "executorch"
            what the packages coremltools and executorch make of torch's programs.
        config: plain data for `config.json` beside the programs' inputs, outputs and versions.
        tokenizer: as `padding_tokenizer` returns it.
        dtype: precision of the programs: float32, or one of `HALF`.

    Returns:
        The files.

    Raises:
        UserError: If the folder exists and is not empty, there is no such format, or not in this precision, the
            libraries for ONNX are not installed, or the programs' features differ from the towers'.
        OSError: If the files cannot be written.
    """
    target = Path(folder).expanduser().absolute()
    check_free(target)
    _check_format(format, dtype)
    dimension = 0
    if format == "immich":
        towers, dimension = _for_immich(towers, tokenizer)
    single = format in ("immich", *converters.REQUIREMENTS)
    traced = [_trace(tower, format, dtype, single) for tower in towers]
    if dtype != torch.float32:
        pairs = {f"{tower.name}s": (torch.cat(tower.expected), torch.cat(tower.exact)) for tower in traced}
        say(described_half(pairs, dtype))
    described = {tower.name: _described(tower, format) for tower in traced}
    about = {**config, "format": format, "dtype": _name(dtype), "towers": described, "versions": _versions(format)}
    with writing(target):  # names the target if its folder is a file
        target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as staged:
        staged.mkdir()
        if format == "immich":
            assert tokenizer is not None  # or `_for_immich` would have raised
            immich.write_configuration(staged, config, dimension, tokenizer)
        else:
            (staged / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(str(staged / "tokenizer.json"))
        if format in converters.REQUIREMENTS:
            _convert(traced, staged, format, dtype)
        else:
            for tower in traced:
                path = staged / _FILES[format][tower.name]
                with _quiet():
                    _write(tower, path, target)
                    _check(tower, _load(path))
                    if format == "onnx_int8":
                        _quantize(path)
    return sorted(target.iterdir())


def _for_immich(towers: Sequence[Tower], tokenizer: Tokenizer | None) -> tuple[list[Tower], int]:
    """Return the towers with Immich's inputs and outputs, and the embedding dimension.

    Raises:
        UserError: If there is no tokenizer, or Immich has no such embedding dimension.
    """
    image, text = towers
    pad = immich.padding_of(tokenizer)
    with torch.no_grad():
        dimension = immich.known_dimension(image.module(image.inputs["image"][:1]).shape[-1])
    texts = immich.Texts(text.module, dimension, pad, masked="attention_mask" in text.inputs)
    return [
        Tower("image", immich.Images(image.module, dimension).eval(), image.inputs),
        Tower("text", texts.eval(), immich.ids_of_32_bits(text.inputs)),
    ], dimension


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
        output: name of its features.
        single: whether its program takes one row; otherwise any number.
        example: inputs that it is traced with.
        batches: inputs that its program is checked on.
        expected: features of each of `batches`.
        exact: the same in the precision that the tower had.
    """

    name: str
    module: nn.Module
    output: str
    single: bool
    example: dict[str, Tensor]
    batches: list[dict[str, Tensor]]
    expected: list[Tensor]
    exact: list[Tensor]


@torch.no_grad()
def _trace(tower: Tower, format: str, dtype: torch.dtype, single: bool) -> _Traced:
    counts = [1] * (_TRACED + sum(_CHECKED)) if single else [_TRACED, *_CHECKED]
    split = {name: rows.split(counts) for name, rows in tower.inputs.items()}
    example, *batches = ({name: rows[index] for name, rows in split.items()} for index in range(len(counts)))
    exact = [tower.module(*batch.values()) for batch in batches]
    module = tower.module
    expected = exact
    if dtype != exact[0].dtype:
        # Core ML's converter takes the weights in float32, and computes in half precision by itself.
        half = copy.deepcopy(module).to(dtype) if format == "coreml" else module.to(dtype)
        expected = [half(*batch.values()).to(dtype) for batch in batches]
    return _Traced(tower.name, module, f"{tower.name}_features", single, example, batches, expected, exact)


def described_half(features: Mapping[str, tuple[Tensor, Tensor]], dtype: torch.dtype) -> str:
    """Return a sentence about how far features in a half precision are from others.

    Args:
        features: of each input by name, features [N, E] in half precision, and in float32.
        dtype: the half precision.

    Raises:
        UserError: If a feature is not finite: weights or activations are too large for float16.
    """
    errors = []
    for name, (rounded, exact) in features.items():
        output, reference = rounded.double(), exact.double()
        if not output.isfinite().all():
            raise UserError(
                f"Expected finite features of {name} in {_name(dtype)}, got others: leave --dtype out"
                f"{', or choose bfloat16' * (dtype == torch.float16)}."
            )
        cosine = float(F.cosine_similarity(output, reference).min())
        difference = float((output - reference).abs().max() / reference.abs().max())
        size = f"cosines from {cosine:.6f} and differ by at most {difference:.1e} of the largest"
        errors.append(f"those of {name} have {size}")
    return f"Features in {_name(dtype)} against those in float32: {'; '.join(errors)}."


def _check_format(format: str, dtype: torch.dtype) -> None:
    if format not in _FILES:
        raise UserError(f"Expected the format {' or '.join(_FILES)}, got {format!r}.")
    if format in ("onnx", "coreml") and dtype == torch.bfloat16:
        raise UserError(
            f"Expected float32 or float16, got bfloat16, which {'ONNX' if format == 'onnx' else 'Core ML'}'s "
            "convolutions do not support: choose another precision, or the format torch_export."
        )
    if dtype != torch.float32 and _name(dtype) not in HALF.get(format, ()):
        raise UserError(f"Expected float32 for the format {format}, got {_name(dtype)}: leave dtype out.")
    if "onnx" not in format and format != "immich":
        return
    needed = ("onnx", "onnxscript", *(["onnxruntime"] if format == "onnx_int8" else []))
    missing = [library for library in needed if find_spec(library) is None]
    if missing:
        raise UserError(
            f"Expected {' and '.join(missing)} for the format {format}, found no such library: install it with "
            '`pip install "vlightning[onnx]"`.'
        )


def _program(tower: _Traced) -> ExportedProgram:
    shapes = None if tower.single else [{0: Dim("batch")} for _ in tower.example]
    # Strict tracing would interpret the bytecode of timm and open_clip without a benefit.
    return torch.export.export(tower.module, tuple(tower.example.values()), dynamic_shapes=shapes, strict=False)


def _convert(towers: Sequence[_Traced], folder: Path, format: str, dtype: torch.dtype) -> None:
    """Write programs by a converter, and compare what can be compared here.

    Raises:
        UserError: As `converters.convert`, or if a converted program is another one.
    """
    jobs = []
    with _quiet():
        for tower in towers:
            rows = {name: torch.cat([batch[name] for batch in tower.batches]) for name in tower.example}
            jobs.append(converters.Job(tower.name, _program(tower), rows, tower.output))
    results = converters.convert(jobs, folder, format, dtype)
    reports = []
    for tower in towers:
        result = results[tower.name]
        if format == "executorch":
            features: Tensor = result["features"]
            rows_of = iter(features.split(1))
            _check(tower, lambda *inputs, rows=rows_of: next(rows))
            error = float((features - torch.cat(tower.expected)).abs().max())
            reports.append(f"{_FILES[format][tower.name]} differs by at most {error:.1e}")
        else:
            reports.append(_compared(tower, result))
    if format == "executorch":
        say(f"Features of ExecuTorch's runtime against torch's: {', '.join(reports)}.")
    else:
        say(f"Core ML predicts on macOS alone, so that features were not compared; {'; '.join(reports)}.")


def _compared(tower: _Traced, result: Mapping[str, Any]) -> str:
    """Return what a program of Core ML has in common with the tower.

    Raises:
        UserError: If inputs or outputs are others, or weights are missing that no BatchNorm was folded into.
    """
    inputs = {name: list(rows.shape) for name, rows in tower.example.items()}
    shapes = {"inputs": inputs, "output": {tower.output: list(tower.expected[0].shape)}}
    for kind, expected in shapes.items():
        if result[kind] != expected:
            raise UserError(
                f"Expected the {kind} {expected} of the {tower.name} tower in Core ML's program, got {result[kind]}: "
                "nothing is written; export in another layout."
            )
    missing = result["missing"]
    folded = any(
        isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)) for layer in tower.module.modules()
    )
    if missing and not folded:
        raise UserError(
            f"Expected the weights of the {tower.name} tower in Core ML's program, got it without {missing[0]}: "
            "nothing is written; export in another layout."
        )
    held = result["weights"] - len(missing)
    rest = f" (BatchNorms were folded into {len(missing)})" * bool(missing)
    return f"{tower.name}: inputs, output and {held} of {result['weights']} tensors of weights are torch's{rest}"


def _write(tower: _Traced, path: Path, target: Path) -> None:
    program = _program(tower)
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".pt2":
        with writing(target):
            torch.export.save(program, path)
        return
    converted = torch.onnx.export(
        program,
        dynamo=True,
        input_names=list(tower.example),
        output_names=[tower.output],
        dynamic_shapes=None if tower.single else [{0: "batch"} for _ in tower.example],
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
        reduce_range=True,  # 7 bits: x86 processors without VNNI saturate the sums of two products of 8 bits
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
        return {"name": name, "shape": [1 if tower.single else "batch", *like.shape[1:]], "dtype": _name(like.dtype)}

    return {
        "file": _FILES[format][tower.name],
        "inputs": [tensor(name, rows) for name, rows in tower.example.items()],
        "output": tensor(tower.output, tower.expected[0]),
    }


def _versions(format: str) -> dict[str, str]:
    libraries = ["vlightning", "torch", "timm", "open_clip_torch"]
    if format.startswith("onnx"):
        libraries += ["onnx", "onnxscript", *(["onnxruntime"] if format == "onnx_int8" else [])]
    converter = dict([converters.REQUIREMENTS[format].split("==")]) if format in converters.REQUIREMENTS else {}
    return {name: version(name) for name in libraries} | converter


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
