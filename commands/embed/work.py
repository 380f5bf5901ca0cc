"""The work of `vlightning embed`, after its arguments are parsed: its processes, the manifest, and resume."""

import argparse
import json
import warnings
from collections import Counter
from typing import Any

from lightning.fabric import Fabric

from ...callbacks.distributed.collectives import rank, world_size
from ...common.errors import UserError
from ...common.files import UNFINISHED, clear_leftovers
from ...common.manifest import (
    MANIFEST,
    byte_size,
    changed_software,
    check_settings,
    check_space,
    write_manifest,
)
from ...common.messages import say, warn
from ...common.parts import Part, parse_part
from ...common.shown import shown
from ...datamodules.stores.shards import Shard, caption_count, counted, finished_shards, shard_path
from .passes import embed
from .preparation import Embedding, prepare


def work(typed: argparse.Namespace, words: list[str]) -> str:
    """Embed a split of a data set.

    Args:
        typed: The parsed arguments.
        words: Those of the data.

    Raises:
        UserError: If an argument is wrong, the data or the model cannot be used, or the folder holds another store.
    """
    if typed.seed is not None and typed.seed < 0:
        raise UserError(f"Expected at least 0 after --seed, got {typed.seed}: increase it.")
    for name, least in (("views", 0), ("shard_size", 1), ("batch_size", 1), ("num_workers", 0)):
        if getattr(typed, name) < least:
            raise UserError(f"Expected at least {least} after --{name}, got {getattr(typed, name)}: increase it.")
    part = parse_part(typed.part, "--part")
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # one process needs none
    fabric = Fabric(
        accelerator=typed.accelerator,
        devices=typed.devices,
        num_nodes=typed.num_nodes,
        strategy="ddp" if typed.devices * typed.num_nodes > 1 else "auto",
    )
    fabric.launch()
    if rank() == 0:  # converts files, which the other processes then find
        prepared = prepare(typed, words)
    fabric.barrier()
    if rank() != 0:
        prepared = prepare(typed, words)
    prepared.model.network.to(fabric.device)
    # All processes must see the same shards before one of them writes another.
    problem = _start(prepared) if rank() == 0 else None
    if problem := fabric.broadcast(problem):
        raise problem
    finished = fabric.broadcast(finished_shards(prepared.folder, prepared.shards))
    missing = [number for number in part.of(range(prepared.shards)) if number not in finished]
    if missing and rank() == 0:
        rows = sum(len(prepared.rows(number)) for number in missing)
        say(f"Embedding {rows:,} of {len(prepared.table):,} rows.")
    embed(prepared, missing[rank() :: world_size()])
    fabric.barrier()
    problem, message = (None, "")
    if rank() == 0:
        try:
            message = _finish(prepared, part)
        except UserError as error:
            problem = error
    if problem := fabric.broadcast(problem):
        raise problem
    return message


def _start(embedding: Embedding) -> Exception | None:
    """Return the error that prevents writing, if any; otherwise write the manifest of an incomplete store."""
    path = embedding.folder / MANIFEST
    try:
        embedding.folder.mkdir(parents=True, exist_ok=True)
        # Listed before the manifest is looked for, which the process of another part may be writing.
        files = [file for file in embedding.folder.iterdir() if not file.name.startswith(UNFINISHED)]
        if path.is_file():
            manifest = json.loads(path.read_text(encoding="utf-8"))
            _check(embedding, manifest)
        elif files:
            raise UserError(
                f"Expected a new folder, an empty one or one of a store after --output, got "
                f"{str(embedding.folder)!r} with other files: give another."
            )
        clear_leftovers(embedding.folder)
        if len(finished_shards(embedding.folder, embedding.shards)) < embedding.shards:
            check_space(embedding.folder, _needed_bytes(embedding), "store fewer --views")
            write_manifest(path, embedding.settings, complete=False)
    except (UserError, ValueError, OSError) as problem:
        return problem
    return None


def _check(embedding: Embedding, manifest: dict[str, Any]) -> None:
    """Check that existing shards are of the same content; a model may have another path with the same weights."""
    settings = _decisive(embedding.settings)
    kept = _decisive({name: manifest.get(name) for name in settings})
    store = f"the store in {str(embedding.folder)!r} was written"
    check_settings(kept, settings, store, "another folder after --output, or the arguments of that store")
    if changed := changed_software(manifest):
        warn(f"The existing shards were written with other software: {', '.join(changed)}.")


def _decisive(content: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the features; dimensions are known when a store is complete."""
    left_out = {"model": ("name", "model", "weights"), "images": ("width",), "texts": ("width",)}
    return {
        entry: {name: value for name, value in values.items() if name not in left_out.get(entry, ())}
        if isinstance(values, dict)
        else values
        for entry, values in content.items()
    }


def _needed_bytes(embedding: Embedding) -> int:
    width = 512  # about; exact sizes need a pass
    images = max(embedding.views, 1) * (embedding.transform is not None)
    return len(embedding.table) * 4 * width * (images + embedding.texts)


def _finish(embedding: Embedding, part: Part) -> str:
    """Write the manifest of the complete store; return what was written.

    The process whose part is done last finds all shards.
    """
    finished = finished_shards(embedding.folder, embedding.shards)
    missing = embedding.shards - len(finished)
    numbers = part.of(range(embedding.shards))
    if missing and all(number in finished for number in numbers):
        return f"Part {part}: {len(numbers)} shards; {missing} of {embedding.shards} are left to other parts."
    if missing:
        raise UserError(
            f"Expected {embedding.shards} shards in {str(embedding.folder)!r}, got {missing} fewer: give the command "
            "again."
        )
    shards = [Shard(shard_path(embedding.folder, number)) for number in range(embedding.shards)]
    causes = Counter[str]()
    for shard in shards:
        causes.update(counted(shard))
    bad = sum(causes.values())
    if bad == len(embedding.table):
        raise UserError(
            f"Expected rows that can be embedded, got {bad} that cannot ({_listed(causes)}): correct the data, and "
            f"remove {str(embedding.folder)!r}."
        )
    settings = embedding.settings
    if settings["images"] is not None:
        views = max(embedding.views, 1)
        settings["images"]["width"] = max(shard.images.shape[1] for shard in shards) // views
    if settings["texts"] is not None:
        settings["texts"]["width"] = shards[0].texts.shape[1]
    counts = {"unusable": dict(causes), "captions": caption_count(shards) if embedding.texts else 0}
    write_manifest(embedding.folder / MANIFEST, settings, complete=True, counts=counts)
    left = f", {bad} of them unusable ({_listed(causes)})" if bad else ""
    size = byte_size(sum(file.stat().st_size for file in embedding.folder.iterdir()))
    return f"{len(embedding.table):,} rows{left} in {embedding.shards} shards, {size}: {shown(str(embedding.folder))}"


def _listed(causes: Counter[str]) -> str:
    return ", ".join(f"{cause}: {count}" for cause, count in causes.items())
