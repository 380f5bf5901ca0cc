"""Sharded checkpoints: a folder with a file for each process, which any number of processes can read.

    last.ckpt/
        shard-00000.pt    process 0's pieces of the sharded tensors, by their path in the checkpoint
        shard-00001.pt
        meta.pt           everything else, with a marker in the place of each sharded tensor; written last

The files hold tensors and plain data only. (The metadata of torch's own format is a pickle, which may run any code.)
"""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...common.errors import UserError

METADATA = "meta.pt"
"""Lightning's name of the metadata file."""
# In the metadata: the number of files with pieces, and the marker of a sharded tensor.
_FILES = "files_with_pieces"
_NOTE = "pieces_along_dimension"

ValueFunction = Callable[[str, Any], Any]
"""Maps a value, given its path in the checkpoint, such as `state_dict/weight`."""


def split_checkpoint(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Separate the sharded tensors of a checkpoint from the rest.

    Args:
        checkpoint: Nested dicts and lists, with tensors that are sharded over all processes among the values.

    Returns:
        The metadata, and this process's pieces by path, on the CPU.

    Raises:
        ValueError: If a tensor is distributed in another way.
    """
    pieces: dict[str, Tensor] = {}
    copied: dict[int, Tensor] = {}  # tied tensors stay tied

    def note(path: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        local = copied.setdefault(id(value), value.to_local().detach().cpu())
        dimension = _dimension(path, value)
        if dimension is None:
            return local
        pieces[path] = local
        return {_NOTE: dimension}

    return map_values(note, checkpoint) | {_FILES: dist.get_world_size()}, pieces


def divide_checkpoint(checkpoint: dict[str, Any], files: int) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Cut weights and optimizer states of a whole checkpoint into pieces, as processes would write them.

    Args:
        checkpoint: Checkpoint of a single process.
        files: Number of pieces of each tensor.

    Returns:
        The metadata, and for each file its pieces by path.
    """
    pieces: list[dict[str, Tensor]] = [{} for _ in range(files)]
    cut: dict[tuple[int, torch.Size], list[Tensor]] = {}  # tied tensors stay tied

    def note(path: str, value: Any) -> Any:
        weight = path.startswith(("state_dict/", "optimizer_states/"))
        if not (weight and isinstance(value, Tensor) and value.dim()):
            return value
        rows = -(-len(value) // files)
        starts = [min(number * rows, len(value)) for number in range(files + 1)]
        parts = cut.setdefault(
            (value.data_ptr(), value.shape), [value[start:end].clone() for start, end in pairwise(starts)]
        )
        for of_file, piece in zip(pieces, parts, strict=True):
            of_file[path] = piece
        return {_NOTE: 0}

    return map_values(note, checkpoint) | {_FILES: files}, pieces


def whole_checkpoint(checkpoint: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Gather the sharded tensors of a checkpoint. Every process must call this.

    Args:
        checkpoint: Nested dicts and lists, with distributed tensors among the values.
        keep: Whether this process keeps the tensors; otherwise None takes their places.
    """
    gathered: dict[int, Tensor | None] = {}  # tied tensors stay tied

    def gather(path: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if id(value) not in gathered:
            whole = value.full_tensor().detach()
            gathered[id(value)] = whole.cpu() if keep else None
        return gathered[id(value)]

    whole: dict[str, Any] = map_values(gather, checkpoint)
    return whole


def read_checkpoint_folder(
    folder: Path, weights_only: bool = True, convert: ValueFunction | None = None
) -> dict[str, Any]:
    """Read a sharded checkpoint of any number of processes as one whole checkpoint.

    Args:
        folder: Checkpoint of `ShardedStrategy`.
        weights_only: False loads arbitrary objects, for files that are trusted.
        convert: Applied to each value; a sharded tensor is joined only for this call, so that a process that keeps a
            part of each tensor never holds more than one whole tensor.

    Raises:
        RuntimeError: If a file is missing.
        UserError: If the folder was written by Lightning's own strategies.
    """
    meta, files = read_metadata(folder, weights_only)
    shards = [torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only) for file in files]

    joined: dict[tuple[Any, ...], Tensor] = {}  # tied tensors stay tied

    def put_together(path: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value if convert is None else convert(path, value)
        parts = [shard[path] for shard in shards]
        if convert is not None:
            return convert(path, torch.cat(parts, value[_NOTE]))
        key = tuple((piece.data_ptr(), piece.shape) for piece in parts)
        if key not in joined:
            joined[key] = torch.cat(parts, value[_NOTE])
        return joined[key]

    whole: dict[str, Any] = map_values(put_together, meta, is_value=lambda value: value.keys() == {_NOTE})
    return whole


def read_metadata(folder: Path, weights_only: bool = True) -> tuple[dict[str, Any], list[Path]]:
    """Read the values that are not sharded, and find the files with the pieces of the others.

    Raises:
        RuntimeError: If a file is missing.
        UserError: If the folder was written by Lightning's own strategies.
    """
    if not (folder / METADATA).is_file():
        raise RuntimeError(f"there is no {METADATA} in the folder, which is written last")
    meta = torch.load(folder / METADATA, map_location="cpu", weights_only=weights_only)
    if _FILES not in meta:
        raise UserError(
            f"Expected a folder that ShardedStrategy wrote, got {folder} in the format of "
            "torch.distributed.checkpoint: convert it with `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {folder}`."
        )
    files = [folder / shard_file(number) for number in range(meta.pop(_FILES))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise RuntimeError(f"{len(missing)} of {len(files)} files with pieces are missing, such as {missing[0]}")
    return meta, files


def local_shard(whole: Tensor, like: DTensor) -> DTensor:
    """Return a tensor distributed like another one of its shape; the memory of `whole` is not kept."""
    mesh = like.device_mesh
    dimension = _dimension("tensor", like)
    piece = whole
    if dimension is not None:
        # As torch shards: equal parts, rounded up, so that the last ones may be smaller or empty.
        size = -(-whole.shape[dimension] // mesh.size())
        start = min(mesh.get_local_rank() * size, whole.shape[dimension])
        piece = whole.narrow(dimension, start, min(size, whole.shape[dimension] - start))
    local = piece.to(mesh.device_type, copy=True).contiguous()
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def shard_file(number: int) -> str:
    """Return the name of the file with the pieces of a process."""
    return f"shard-{number:05d}.pt"


def map_values(
    function: ValueFunction, tree: Any, path: str = "", is_value: Callable[[dict[Any, Any]], bool] = lambda _: False
) -> Any:
    """Return a copy of nested dicts, lists and tuples with `function(path, value)` for each value.

    A dict for which `is_value` is true is a value itself. `path` is the path of the tree.
    """
    below = f"{path}/" if path else ""
    if isinstance(tree, dict) and not is_value(tree):
        copied = copy.copy(tree)  # keeps the class: a state dict carries versions in an attribute
        copied.update({key: map_values(function, value, f"{below}{key}", is_value) for key, value in tree.items()})
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(map_values(function, value, f"{below}{n}", is_value) for n, value in enumerate(tree))
    return function(path, tree)


def _dimension(path: str, tensor: DTensor) -> int | None:
    """Return the dimension along which a tensor is cut into pieces; None if every process has all of it."""
    if tensor.device_mesh.size() == dist.get_world_size() and len(tensor.placements) == 1:
        (placement,) = tensor.placements
        if isinstance(placement, Shard):
            return placement.dim
        if isinstance(placement, Replicate):
            return None
    raise ValueError(
        f"Expected tensors that are sharded along one dimension over all processes, got {path!r} distributed as "
        f"{tensor.placements} over {tensor.device_mesh}: shard it over all processes."
    )
