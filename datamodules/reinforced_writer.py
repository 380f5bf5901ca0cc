"""Writes reinforced shards in the layout of DataCompDR."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from .replay import Augmentation

EmbeddingFormat = Literal["npz", "pth.gz"]


@dataclass
class ReinforcedRecord:
    """All that is kept of one sample.

    Args:
        key: what the names of its members begin with; unlike its neighbours'.
        picture: the encoded picture.
        suffix: of the picture's file, such as "jpg".
        caption: the real caption.
        synthetic: synthetic captions by the name of their kind ("syn_text" in version 1).
        augmentations: recorded ones.
        size: height and width of the picture that their boxes were measured on; None leaves it out, as the vendor does.
        image_embeddings: [A, D], of the augmentations.
        text_embeddings: [1, D], of the real caption.
        synthetic_embeddings: [S, D] for each kind.
    """

    key: str
    picture: bytes
    suffix: str
    caption: str
    synthetic: Mapping[str, Sequence[str]]
    augmentations: Sequence[Augmentation]
    size: tuple[int, int] | None
    image_embeddings: torch.Tensor
    text_embeddings: torch.Tensor
    synthetic_embeddings: Mapping[str, torch.Tensor]


def write_shard(
    path: str | Path,
    records: Iterable[ReinforcedRecord],
    version: Literal[1, 2] = 1,
    embeddings: EmbeddingFormat = "npz",
) -> None:
    """Write a shard, or nothing: it has its final name only once it is complete.

    Args:
        path: of the tar file.
        records: the samples.
        version: 1 puts all text embeddings into one array and knows one kind of synthetic captions, 2 has an array for
            each kind.
        embeddings: "npz" holds float32, without compression, so that a row is read without the others; "pth.gz" holds
            bfloat16.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".incomplete-{uuid.uuid4().hex}")
    try:
        with tarfile.open(staged, "w", format=tarfile.USTAR_FORMAT) as tar:
            for record in records:
                for kind, content in _members(record, version, embeddings).items():
                    member = tarfile.TarInfo(f"{record.key}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)


def _members(record: ReinforcedRecord, version: int, embeddings: EmbeddingFormat) -> dict[str, bytes]:
    augmentations: dict[str, object] = {"param_aug": [augmentation.as_json() for augmentation in record.augmentations]}
    if record.size is not None:
        augmentations |= {"original_height": record.size[0], "original_width": record.size[1]}
    synthetic = {name: list(captions) for name, captions in record.synthetic.items()}
    return {
        record.suffix: record.picture,
        "txt": record.caption.encode(),
        "syn.json": json.dumps(synthetic).encode(),
        "paug.json": json.dumps(augmentations).encode(),
        "json": json.dumps({"uid": record.key}).encode(),
        embeddings: _encoded(_arrays(record, version), embeddings),
    }


def _arrays(record: ReinforcedRecord, version: int) -> dict[str, torch.Tensor]:
    arrays = {"image_emb": record.image_embeddings, "text_emb": record.text_embeddings}
    if version == 2:
        return arrays | {f"{name}_emb": rows for name, rows in record.synthetic_embeddings.items()}
    if len(record.synthetic_embeddings) != 1:
        raise ValueError(
            f"found {len(record.synthetic_embeddings)} kinds of synthetic captions, expected one in version 1: write "
            "version 2"
        )
    return arrays | {"text_emb": torch.cat([record.text_embeddings, *record.synthetic_embeddings.values()])}


def _encoded(arrays: dict[str, torch.Tensor], embeddings: EmbeddingFormat) -> bytes:
    content = io.BytesIO()
    if embeddings == "npz":
        np.savez(content, **{name: rows.float().numpy() for name, rows in arrays.items()})  # type: ignore[arg-type]
        return content.getvalue()
    torch.save({name: rows.to(torch.bfloat16).clone() for name, rows in arrays.items()}, content)
    return gzip.compress(content.getvalue(), compresslevel=1)
