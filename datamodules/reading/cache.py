"""Cache of arrays and rows that are computed from files."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...common.errors import UserError
from ...common.files import cache_folder, replacing
from ...common.shown import shown
from .remote import stamp_of

log = logging.getLogger(__name__)
_VERSION = 1
_ROWS_VERSION = 1
SHOWN_AFTER = 3.0
"""Seconds after which the progress of a conversion is shown."""

Arrays = dict[str, np.ndarray]


def index_cache(cache_dir: str | None) -> Path:
    """Return the folder of the cached arrays.

    Args:
        cache_dir: the folder; None for `$XDG_CACHE_HOME/vlightning`, which is `~/.cache/vlightning` by default.
    """
    if cache_dir is not None:
        return Path(os.path.expanduser(cache_dir)).absolute()
    return cache_folder()


def cached_arrays(file: str, cache: Path, subject: str, make: Callable[[], Arrays]) -> Arrays:
    """Return arrays computed from a file; they are cached until the file's path, size or modification time changes.

    Args:
        file: absolute path or URL.
        cache: folder of the cached arrays.
        subject: what the arrays hold, in the key of the cache and in messages.
        make: function that computes the arrays.
    """
    stamp = hashlib.sha1(f"{_VERSION}\0{stamp_of(file)}\0{subject}".encode()).hexdigest()
    cached = cache / f"{stamp}.npz"
    try:
        with np.load(cached, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass
    computed = make()
    try:
        with replacing(cached) as staged, open(staged, "wb") as content:
            np.savez(content, **computed)  # type: ignore[arg-type]
    except OSError as error:  # the next run computes the arrays again
        log.warning("The %s of %s could not be cached (%s)", subject, shown(file), shown(str(error)))
    return computed


def cached_rows(
    make: Callable[[], Iterable[pa.RecordBatch]],
    schema: pa.Schema,
    key: Any,
    cache_dir: str | None,
    origin: str,
    split: str,
) -> Any:
    """Return rows as a memory-mapped `datasets.Dataset`; they are written at the first use.

    Args:
        make: function that returns the rows in batches.
        schema: columns of the rows.
        key: plain data that the rows are a function of, such as the stamps of files; its `repr` names the copy.
        cache_dir: folder of the converted data; None for the default of the `datasets` library.
        origin: the source as the user gave it, for messages.
        split: name of the split, for messages.

    Raises:
        UserError: If there are no rows, or the copy cannot be written.
    """
    import datasets

    folder = Path(os.path.expanduser(cache_dir or datasets.config.HF_DATASETS_CACHE)) / "vlightning"
    stamp = hashlib.sha1(repr((_ROWS_VERSION, schema.to_string(), key)).encode()).hexdigest()
    file = folder / f"{stamp}.arrow"
    if not file.exists():
        # Processes that convert the same files at the same time each write their own copy; the first one stays.
        with replacing(file, keep_existing=True) as staged:
            rows = _write(staged, make(), schema, origin)
            if not rows:
                raise UserError(f"Expected rows in the {split} split ({origin!r}), got none: check the path.")
    return datasets.Dataset.from_file(str(file))


def uncollected(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches with the garbage collector paused, which doubles the time of a parse and finds nothing in it.

    Readers whose objects refer to each other, as those of tar files do, would keep all of them.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield from batches
    finally:
        if is_enabled:
            gc.enable()


def _write(file: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, origin: str) -> int:
    """Write batches as an Arrow stream, and return their number of rows."""
    from datasets.utils import tqdm

    start = time.perf_counter()
    rows = 0
    progress = tqdm(unit=" rows", unit_scale=True, delay=SHOWN_AFTER, desc=f"Reading {shown(origin)}")
    with progress, pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
            progress.update(batch.num_rows)
    seconds = time.perf_counter() - start
    if seconds > SHOWN_AFTER:
        log.info("Read %s rows of %s in %.0f s (%.0f rows/s)", f"{rows:,}", shown(origin), seconds, rows / seconds)
    return rows
