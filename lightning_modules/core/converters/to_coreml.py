"""Convert programs of torch.export to Core ML, in an environment that has coremltools; no part of the package.

Core ML predicts on macOS alone, so that the features of the converted programs are not compared: the shapes of their
inputs and outputs, and their weights, are.
"""

import json
import sys
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
import torch

_SMALLEST = 64  # numbers of a tensor of weights that is looked for; smaller ones are often part of an operation


def main(folder: Path) -> None:
    """Convert the programs of a folder, and write what they hold into `results.pt`."""
    job = json.loads((folder / "job.json").read_text())
    precision = coremltools.precision.FLOAT16 if job["dtype"] == "float16" else coremltools.precision.FLOAT32
    results = {}
    for name, output in job["towers"].items():
        program = torch.export.load(folder / f"{name}.pt2").run_decompositions({})
        _without_aliases(program.graph_module.graph)
        model = coremltools.convert(
            program,
            convert_to="mlprogram",
            outputs=[coremltools.TensorType(name=output)],
            minimum_deployment_target=coremltools.target.iOS17,
            compute_precision=precision,
            skip_model_load=True,
        )
        model.save(str(folder / f"{name}.mlpackage"))
        described = model.get_spec().description
        weights, missing = _compare(program, model, job["dtype"] == "float16")
        results[name] = {
            "inputs": {put.name: _shape(put) for put in described.input},
            "output": {put.name: _shape(put) for put in described.output},
            "weights": weights,
            "missing": missing,
        }
    torch.save(results, folder / "results.pt")


def _without_aliases(graph: torch.fx.Graph) -> None:
    """Remove the operations that return their input, which coremltools 9.0 does not know."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _compare(program: Any, model: Any, rounded: bool) -> tuple[int, list[str]]:
    """Return the number of a program's tensors of weights, and the names of those that a model does not hold.

    A tensor is held if a tensor of the model has the same numbers, in any order, since weights may be transposed. In
    half precision they are rounded, and coremltools replaces numbers below 1e-7, which would be zeros, by 1e-7.
    """
    # A private name, since coremltools 9.0's get_weights_metadata fails where weights are concatenated, as in a ViT.
    operations = [op for function in model._mil_program.functions.values() for op in function.operations]
    held: dict[int, list[Any]] = {}
    for values in (op.outputs[0].val for op in operations if op.op_type == "const"):
        if isinstance(values, np.ndarray) and values.size > _SMALLEST:
            held.setdefault(values.size, []).append(_sorted(values))
    tolerance = {"rtol": 2**-10, "atol": 2e-7} if rounded else {"rtol": 0, "atol": 0}
    wanted = {name: tensor.detach().numpy() for name, tensor in program.state_dict.items()}
    wanted = {name: values for name, values in wanted.items() if values.size > _SMALLEST and values.dtype.kind == "f"}
    missing = [
        name
        for name, values in wanted.items()
        if not any(np.allclose(_sorted(values), other, **tolerance) for other in held.get(values.size, []))
    ]
    return len(wanted), missing


def _sorted(values: Any) -> Any:
    return np.sort(np.asarray(values, np.float32), axis=None)


def _shape(put: Any) -> list[int]:
    return list(put.type.multiArrayType.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
