"""Latency of the towers of an image-text model: milliseconds for a batch of images and for a batch of texts.

    python benchmarks/latency.py
    python benchmarks/latency.py --model MobileCLIP-S2 --model ViT-B-32 --batch 1 32 --channels-last --compile
    python benchmarks/latency.py --fuse

Weights are random, in the precision of the row, without autocast. The calls of all rows are interleaved, so that drift
of the machine's speed affects all alike; p50 and p95 are percentiles of a row's calls. A call ends when its features
are computed, also on a GPU.

`--fuse` times the image tower in three forms: as trained; with fused branches, as by the vendor's code; and with the
remaining norms and scales folded too.
"""

import argparse
import copy
import itertools
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timing import medians, seconds
from torch import Tensor, nn

from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.lightning_modules.networks.clip.programs import export_towers
from vlightning.lightning_modules.networks.clip.reparameterize import norms_left, reparameterize
from vlightning.lightning_modules.networks.clip.towers import ImageTower, towers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP = 3
PAUSE = 0.05  # seconds after which idle threads of the other library no longer spin
Inputs = tuple[Tensor, Tensor]
Call = Callable[[], Any]


class Row(NamedTuple):
    """A configuration that is timed."""

    model: str
    runtime: str
    dtype: str
    fused: bool
    channels_last: bool
    batch: int

    def __str__(self) -> str:
        fused, layout = "yes" if self.fused else "no", "channels_last" if self.channels_last else "contiguous"
        return f"{self.model:18} {self.runtime:11} {self.dtype:9} {fused:5} {layout:13} {self.batch:5}"


def inputs(model: Any, row: Row, options: argparse.Namespace) -> Inputs:
    """Return images in the row's layout, and token ids."""
    size = side(row.model, options)
    images = torch.rand(row.batch, 3, size, size, device=options.device)
    ids = torch.randint(model.vocab_size, (row.batch, model.context_length), device=options.device)
    return (images.contiguous(memory_format=torch.channels_last) if row.channels_last else images), ids


def side(name: str, options: argparse.Namespace) -> int:
    """Return the side of a model's images in pixels."""
    return options.image_size or preprocessing_of(name).image_size


def torch_calls(model: Any, row: Row, options: argparse.Namespace) -> dict[str, Call]:
    """Return a call of each tower with torch."""
    calls: dict[str, Call] = {}
    pair = towers(model, row.fused, dtype=DTYPES[row.dtype])
    for name, tower, given in zip(("image", "text"), pair, inputs(model, row, options), strict=True):
        placed: Any = laid_out(tower.to(options.device), row.channels_last)
        if row.runtime == "compile":
            placed = torch.compile(placed, fullgraph=True, dynamic=False)
        calls[name] = ending(placed, given)
    return calls


def onnx_calls(model: Any, row: Row, options: argparse.Namespace) -> dict[str, Call]:
    """Return a call of each tower with onnxruntime on the CPU."""
    import onnxruntime  # type: ignore[import-untyped]

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    if row.dtype == "float16":  # microsoft/onnxruntime#28392
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    calls: dict[str, Call] = {}
    with tempfile.TemporaryDirectory() as folder:
        export_towers(model, folder, "onnx", side(row.model, options), row.fused, dtype=DTYPES[row.dtype])
        for name, given in zip(("image", "text"), inputs(model, row, options), strict=True):
            session = onnxruntime.InferenceSession(Path(folder) / f"{name}.onnx", settings)
            feed = {session.get_inputs()[0].name: given.numpy()}
            calls[name] = partial(session.run, None, feed)
    return calls


def laid_out(tower: nn.Module, channels_last: bool) -> nn.Module:
    """Lay out convolutions with channels last or first."""
    return tower.to(memory_format=torch.channels_last) if channels_last else tower


def ending(tower: Callable[[Tensor], Tensor], given: Tensor) -> Call:
    """Return a call that waits for the device."""

    def call() -> None:
        tower(given)
        if given.is_cuda:
            torch.cuda.synchronize()

    return call


def rows(options: argparse.Namespace) -> list[Row]:
    """Measure and print."""
    layouts = [False, True] if options.channels_last else [False]
    runtimes = ["torch", *(["compile"] if options.compile else [])]
    found = [
        Row(*asked)
        for asked in itertools.product(options.model, runtimes, options.dtype, [False, True], layouts, options.batch)
    ]
    if options.onnx:
        precisions = [dtype for dtype in options.dtype if dtype != "bfloat16"]
        asked = itertools.product(options.model, ["onnxruntime"], precisions, [False, True], [False], options.batch)
        found += [Row(*row) for row in asked]
    return found


def latencies(options: argparse.Namespace) -> None:
    """Time both towers of each row and print a table."""
    models = {name: build_model(name, options.image_size).eval() for name in options.model}
    calls: dict[tuple[Row, str], Call] = {}
    for row in rows(options):
        make = onnx_calls if row.runtime == "onnxruntime" else torch_calls
        calls |= {(row, name): call for name, call in make(models[row.model], row, options).items()}
    times: dict[tuple[Row, str], list[float]] = {key: [] for key in calls}
    for repeat in range(WARM_UP + options.repeats):
        for key, call in calls.items():
            time.sleep(PAUSE if options.onnx else 0)
            taken = seconds(call)
            if repeat >= WARM_UP:
                times[key].append(1000 * taken)
    print(f"{'model':18} {'runtime':11} {'dtype':9} {'fused':5} {'layout':13} {'batch':>5}", end="")
    print("".join(f"{title:>11}" for title in ("image p50", "p95", "text p50", "p95", "images/s")))
    for row in rows(options):
        cells = [float(value) for name in ("image", "text") for value in np.percentile(times[row, name], [50, 95])]
        print(row, "".join(f"{value:11.2f}" for value in cells), f"{1000 * row.batch / cells[0]:10.1f}", sep="")


def fusions(options: argparse.Namespace) -> None:
    """Time the forms of each image tower and print their sizes."""
    print(f"{'model':18} {'dtype':9} {'batch':>5} {'form':9}", end="")
    print("".join(f"{title:>10}" for title in ("modules", "norms", "ops", "p50, ms", "speed-up")))
    for name in options.model:
        model: Any = build_model(name, options.image_size).eval()
        visuals = {
            "trained": model.visual,
            "branches": reparameterize(model, "branches").visual,
            "all": reparameterize(model).visual,
        }
        for dtype, batch in itertools.product(options.dtype, options.batch):
            row = Row(name, "torch", dtype, True, options.channels_last, batch)
            images = inputs(model, row, options)[0]
            forms = {
                form: laid_out(
                    ImageTower(copy.deepcopy(visual), True).to(options.device, DTYPES[dtype]), row.channels_last
                )
                for form, visual in visuals.items()
            }
            taken = medians({form: ending(tower, images) for form, tower in forms.items()}, options.repeats)
            for form, tower in forms.items():
                left = [parts(tower), len(norms_left(tower)), operations(tower, images)]
                print(f"{name:18} {dtype:9} {batch:5} {form:9}" + "".join(f"{count:10}" for count in left), end="")
                print(f"{1000 * taken[form]:10.2f}{taken['branches'] / taken[form]:10.2f}")


def parts(tower: nn.Module) -> int:
    """Count modules that compute something."""
    idle = (nn.Identity, nn.Dropout)
    return sum(not isinstance(module, idle) and not list(module.children()) for module in tower.modules())


def operations(tower: nn.Module, images: Tensor) -> int:
    """Count calls of torch's operators, without views and no-ops."""
    graph = torch.export.export(tower, (images,), strict=False).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return sum(name.startswith("aten.") and "dropout" not in name for name in names)


def device_name(device: torch.device) -> str:
    """Return the processor's name, else its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="MobileCLIP's or open_clip's name; again for another")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="of the weights")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="images or texts in a call")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--image-size", type=int, help="pixels; the model's own by default")
    parser.add_argument("--channels-last", action="store_true", help="also with channels last; with --fuse, only so")
    parser.add_argument("--compile", action="store_true", help="also by torch.compile")
    parser.add_argument("--onnx", action="store_true", help="also by onnxruntime, which is on the CPU")
    parser.add_argument("--fuse", action="store_true", help="compare forms of the image tower instead")
    options = parser.parse_args()
    options.model = options.model or ["MobileCLIP-S0"]
    if options.onnx and options.device.type != "cpu":
        parser.error("--onnx is for --device cpu")
    # Every row is a module of the same class, and each is compiled by itself.
    torch._dynamo.config.recompile_limit = 1000
    print(
        f"{device_name(options.device)}, {torch.get_num_threads()} threads, torch {torch.__version__}; milliseconds, "
        f"{options.repeats} interleaved calls"
    )
    with torch.no_grad():
        (fusions if options.fuse else latencies)(options)


if __name__ == "__main__":
    main()
