"""The passes of the towers over the rows, and the shards that they fill."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...datamodules.base.loaders import inner_loader
from ...datamodules.stores.shards import NOT_FINITE, ShardRows, shard_path, write_shard
from .preparation import Embedding
from .rows import EmbeddedRow, EmbeddedSet, as_list


def embed(embedding: Embedding, shards: Sequence[int]) -> None:
    """Write shards; no batch has rows of two of them, so that any number of processes writes the same bytes."""
    batches = [
        list(rows[start : start + embedding.batch_size])
        for rows in map(embedding.rows, shards)
        for start in range(0, len(rows), embedding.batch_size)
    ]
    if not batches:
        return
    dataset = EmbeddedSet(embedding.table, embedding.transform, embedding.views, embedding.seed, embedding.texts)
    dataset.decoder = embedding.decoder
    loader = inner_loader(dataset, as_list, embedding.num_workers, batch_sampler=batches)
    rows: list[EmbeddedRow] = []
    features: list[Tensor] = []
    for batch in loader:
        rows += [row._replace(views=None) for row in batch]
        if embedding.transform is not None:
            features.append(_image_features(embedding, batch))
        number = rows[0].row // embedding.shard_size
        if len(rows) == len(embedding.rows(number)):
            write_shard(shard_path(embedding.folder, number), _shard_rows(embedding, rows, features))
            rows = []
            features = []


@torch.no_grad()
def _image_features(embedding: Embedding, batch: Sequence[EmbeddedRow]) -> Tensor:
    """Return features [B, K, D] of the views of a batch, zeros for rows with a fault; [B, 0] without any image."""
    model = embedding.model
    used = [index for index, row in enumerate(batch) if row.views is not None]
    views = max(embedding.views, 1)
    if not used:
        return torch.zeros(len(batch), 0)
    pixels = torch.cat([row.views for row in batch if row.views is not None])
    encoded = torch.cat(
        [
            model.images(embedding.finish(part.to(model.device))).float().cpu()
            for part in pixels.split(embedding.batch_size)
        ]
    )
    features = torch.zeros(len(batch), views, encoded.shape[1])
    features[used] = encoded.view(len(used), views, -1)
    return features


def _shard_rows(embedding: Embedding, rows: Sequence[EmbeddedRow], features: Sequence[Tensor]) -> ShardRows:
    written = ShardRows()
    images: Tensor | None = None
    if embedding.transform is not None:
        width = max(part.shape[-1] for part in features)
        views = max(embedding.views, 1)
        parts = [part if part.ndim == 3 else torch.zeros(len(part), views, width) for part in features]
        images = torch.cat(parts)
        written.features = images
    for number, row in enumerate(rows):
        fault = row.fault
        if fault is None and images is not None and not bool(images[number].isfinite().all()):
            fault = NOT_FINITE
        written.names.append(row.name)
        written.image_ids.append(row.image_id)
        written.keys.append(row.key)
        written.faults.append(fault)
        written.captions.append(row.captions)
    if embedding.texts:
        written.text_features = torch.cat(list(_text_features(embedding, rows)))
    return written


@torch.no_grad()
def _text_features(embedding: Embedding, rows: Sequence[EmbeddedRow]) -> Iterator[Tensor]:
    captions = [text for row in rows for text in row.captions]
    if not captions:  # for the dimension
        yield embedding.model.texts(["a"]).float().cpu()[:0]
    for start in range(0, len(captions), embedding.batch_size):
        yield embedding.model.texts(captions[start : start + embedding.batch_size]).float().cpu()
