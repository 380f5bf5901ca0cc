"""Features that a command computes once and keeps for its next runs: stores, as `vlightning embed` writes them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...callbacks.distributed.collectives import gather, rank
from ...common.errors import UserError
from ...common.files import WriteError, remove
from ...common.manifest import MANIFEST, plain_json, write_manifest
from ...common.messages import warn
from ...datamodules.stores.identity import transform_digest
from ...datamodules.stores.shards import SUFFIX, ShardRows, shard_path, write_shard
from ...datamodules.stores.store import FeatureStore
from .model import ImageTextModel

SHARD_SIZE = 2048


def image_settings(model: ImageTextModel, sources: Any) -> dict[str, Any]:
    """Return what decides features of images, as plain data; `sources` tells what is embedded."""
    preprocessing = transform_digest(model.prepared, False)
    return _settings(model, sources) | {"images": {"views": 0, "preprocessing": preprocessing, **_UNIT}, "texts": None}


def text_settings(model: ImageTextModel, sources: Any) -> dict[str, Any]:
    """Return what decides features of texts, as plain data; `sources` tells what is embedded."""
    return _settings(model, sources) | {"images": None, "texts": {"tokenizer": None, **_UNIT}}


_UNIT = {"projected": True, "normalized": True}


def _settings(model: ImageTextModel, sources: Any) -> dict[str, Any]:
    settings = {
        "model": {"name": model.name, "model": None, "weights": None, "sha256": model.sha256, **model.tower_digests()},
        "data": {"sources": sources, "shard_size": SHARD_SIZE},
    }
    return plain_json(settings)


def kept_folder(cache: Path, settings: dict[str, Any]) -> Path:
    """Return the folder of the store of features, by what decides them."""
    decisive = settings | {"model": {name: value for name, value in settings["model"].items() if name != "name"}}
    return cache / hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]


def read_kept(folder: Path) -> ShardRows | None:
    """Return the rows of a store; None if there is none, or it cannot be read: it is then computed again."""
    rows = ShardRows()
    images: list[torch.Tensor] = []
    texts: list[torch.Tensor] = []
    try:
        store = FeatureStore(folder)
        for shard in store.shards:
            rows.names += [str(name) for name in shard.values("image")]
            rows.image_ids += shard.values("image_id")
            rows.keys += shard.values("key")
            rows.faults += shard.values("fault")
            if store.sides["image"] is not None:
                images.append(torch.from_numpy(shard.images.copy())[:, None])
            if store.sides["text"] is not None:
                texts.append(torch.from_numpy(shard.texts.copy()))
                rows.captions += [shard.captions(row) for row in range(len(shard))]
            if "label" in shard.batch.schema.names:
                rows.labels = [*(rows.labels or []), *shard.values("label")]
    except (UserError, LookupError):
        return None
    if not rows.names:
        return None
    rows.features = torch.cat(images) if images else None
    rows.text_features = torch.cat(texts) if texts else None
    rows.captions = rows.captions or [[] for _ in rows.names]
    return rows


def write_kept(folder: Path, rows: ShardRows, settings: dict[str, Any], first: int = 0) -> None:
    """Write the shards of rows from the row `first` on, then the manifest; warn if they cannot be written."""
    count = len(rows.names)
    content = {side: settings[side] and dict(settings[side]) for side in ("images", "texts")}
    for side, features in (("images", rows.features), ("texts", rows.text_features)):
        if features is not None:
            content[side]["width"] = features.shape[-1]
    data = settings["data"] | {"rows": [count]}
    try:
        for start in range(first // SHARD_SIZE * SHARD_SIZE, count, SHARD_SIZE):
            write_shard(shard_path(folder, start // SHARD_SIZE), rows.between(start, start + SHARD_SIZE))
        write_manifest(folder / MANIFEST, settings | content | {"data": data}, complete=True)
        for file in folder.glob(f"*{SUFFIX}"):
            if int(file.stem) * SHARD_SIZE >= count:
                remove(file)
    except WriteError as error:
        warn(f"The features are not kept: {error}")


def kept(cache: Path | None, settings: Callable[[], dict[str, Any]], make: Callable[[], ShardRows]) -> ShardRows:
    """Return features from their store, or make them and write it.

    Args:
        cache: Folder of the stores; None keeps none.
        settings: Returns what decides the features.
        make: Computes them.
    """
    if cache is None:
        return make()
    decisive = settings()
    folder = kept_folder(cache, decisive)
    stored = read_kept(folder)
    # All processes do the same, since they encode together: rank 0 writes only after all have looked.
    all_have_it = bool(gather(torch.tensor([stored is not None])).all())
    if stored is not None and all_have_it:
        return stored
    rows = make()
    if rank() == 0:
        write_kept(folder, rows, decisive)
    return rows
