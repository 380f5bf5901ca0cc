"""Convert programs of torch.export to ExecuTorch, in an environment that has it, and run them; no part of the package.

XNNPACK, ExecuTorch's library for processors of phones and computers, runs what it has, ExecuTorch's portable operations
the rest.
"""

import json
import sys
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime


def main(folder: Path) -> None:
    """Convert the programs of a folder, and write the features of their inputs into `results.pt`."""
    job = json.loads((folder / "job.json").read_text())
    results = {}
    for name in job["towers"]:
        program = torch.export.load(folder / f"{name}.pt2")
        converted = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
        file = folder / f"{name}.pte"
        with file.open("wb") as opened:
            converted.write_to_file(opened)
        inputs = torch.load(folder / f"{name}.pt", weights_only=True)
        method = Runtime.get().load_program(file).load_method("forward")
        rows = zip(*(rows.split(1) for rows in inputs.values()), strict=True)
        # The runtime's next call writes into the same memory.
        results[name] = {"features": torch.cat([method.execute(list(row))[0].clone() for row in rows])}
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
