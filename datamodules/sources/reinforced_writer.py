"""Writes reinforced shards in the layout of DataCompDR."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...common.files import clear_leftovers, replacing, swap_in, sync, unfinished_beside
from ..transforms.replay import Augmentation
from .tar import index_beside

EmbeddingFormat = Literal["npz", "pth.gz"]
Version = Literal[1, 2]


@dataclass
class ReinforcedRecord:
    """All that is kept of one sample.

    Args:
        key: what the names of its members begin with; unlike its neighbours'.
        image: the encoded image.
        suffix: of the image's file, such as "jpg".
        caption: the real caption.
        synthetic: synthetic captions by the name of their kind ("syn_text" in version 1).
        augmentations: recorded ones.
        size: height and width of the image that their boxes were measured on; None leaves it out, as the vendor does.
        image_embeddings: [A, D], of the augmentations.
        text_embeddings: [1, D], of the real caption.
        synthetic_embeddings: [S, D] for each kind.
        uid: what identifies the pair, in any copy of the data; the key where it is empty.
        sha256: of the image's file; empty leaves it out.
    """

    key: str
    image: bytes
    suffix: str
    caption: str
    synthetic: Mapping[str, Sequence[str]]
    augmentations: Sequence[Augmentation]
    size: tuple[int, int] | None
    image_embeddings: torch.Tensor
    text_embeddings: torch.Tensor
    synthetic_embeddings: Mapping[str, torch.Tensor]
    uid: str = ""
    sha256: str = ""

    def members(self, version: Version = 1, embeddings: EmbeddingFormat = "npz") -> dict[str, bytes]:
        """Its files by kind; arguments as in :func:`write_shard`.

        Raises:
            ValueError: version 1 was asked for, and there are several kinds of synthetic captions.
        """
        augmentations: dict[str, Any] = {"param_aug": [augmentation.as_json() for augmentation in self.augmentations]}
        identity: dict[str, Any] = {"uid": self.uid or self.key}
        if self.sha256:
            identity["sha256"] = self.sha256
        if self.size is not None:
            original = {"original_height": self.size[0], "original_width": self.size[1]}
            augmentations |= original
            identity |= original
        synthetic = {name: list(captions) for name, captions in self.synthetic.items()}
        return {
            self.suffix: self.image,
            "txt": self.caption.encode(),
            "syn.json": json.dumps(synthetic).encode(),
            "paug.json": json.dumps(augmentations).encode(),
            "json": json.dumps(identity).encode(),
            embeddings: _encoded(self._arrays(version), embeddings),
        }

    def _arrays(self, version: Version) -> dict[str, torch.Tensor]:
        arrays = {"image_emb": self.image_embeddings, "text_emb": self.text_embeddings}
        if version == 2:
            return arrays | {f"{name}_emb": rows for name, rows in self.synthetic_embeddings.items()}
        if len(self.synthetic_embeddings) != 1:
            raise ValueError(
                f"found {len(self.synthetic_embeddings)} kinds of synthetic captions, expected one in version 1: write "
                "version 2"
            )
        return arrays | {"text_emb": torch.cat([self.text_embeddings, *self.synthetic_embeddings.values()])}


def write_shard(
    path: str | Path,
    records: Iterable[ReinforcedRecord],
    version: Version = 1,
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
    with ShardFile(path) as shard:
        for record in records:
            shard.add(record.key, record.members(version, embeddings))
        shard.finish()


class ShardFile:
    """A tar file that is written sample by sample, and has its name only once it is complete and on the disk.

    Beside it stands its index then, `<name>.index.json`: where each sample is, so that a reader need not go through the
    headers, and what the writer has to say of the shard. Left without :meth:`finish`, nothing remains.

    Args:
        path: of the tar file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self.path.parent)
        self._staged = unfinished_beside(self.path)
        self._tar = tarfile.open(self._staged, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  (finish, discard)
        self._keys: list[str] = []
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def add(self, key: str, members: Mapping[str, bytes]) -> None:
        """Append a sample.

        Args:
            key: what the names of its members begin with.
            members: their content by kind.
        """
        self._keys.append(key)
        self._starts.append(self._tar.offset)
        for kind, content in members.items():
            member = tarfile.TarInfo(f"{key}.{kind}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))
        self._stops.append(self._tar.offset)

    def finish(self, **remarks: Any) -> None:
        """Complete the shard, and give it and its index their names.

        Args:
            remarks: plain data for the index.
        """
        self._tar.close()
        sync(self._staged)
        index = {"bytes": self._staged.stat().st_size, "keys": self._keys, "start": self._starts, "stop": self._stops}
        # The index first: a shard that is there is complete, and has one.
        write_json(index_beside(self.path), index | remarks)
        swap_in(self._staged, self.path)

    def discard(self) -> None:
        """Remove what was not finished."""
        self._tar.close()
        self._staged.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file beside its place, and rename it."""
    with replacing(path) as staged:
        staged.write_text(json.dumps(content), encoding="utf-8")


def _encoded(arrays: dict[str, torch.Tensor], embeddings: EmbeddingFormat) -> bytes:
    content = io.BytesIO()
    if embeddings == "npz":
        np.savez(content, **{name: rows.float().numpy() for name, rows in arrays.items()})  # type: ignore[arg-type]
        return content.getvalue()
    torch.save({name: rows.to(torch.bfloat16).clone() for name, rows in arrays.items()}, content)
    return gzip.compress(content.getvalue(), compresslevel=1, mtime=0)  # equal bytes for equal content
