"""Writer of reinforced shards in the layout of DataCompDR."""

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

from ...common.errors import UserError
from ...common.files import clear_leftovers, remove, replacing, swap_in, sync, unfinished_beside
from ..reading.tar import index_beside
from ..transforms.replay import Augmentation

EmbeddingFormat = Literal["npz", "pth.gz"]
Version = Literal[1, 2]


@dataclass
class ReinforcedRecord:
    """One reinforced sample.

    Args:
        key: prefix of the names of the members; adjacent samples need different keys.
        image: the encoded image.
        suffix: file name suffix of the image, such as "jpg".
        caption: the real caption.
        synthetic: the synthetic captions by kind ("syn_text" in version 1).
        augmentations: recorded augmentations.
        size: height and width of the image in which the boxes are measured; None omits the entry, as DataCompDR does.
        image_embeddings: embeddings [A, D] of the augmentations.
        text_embeddings: embedding [1, D] of the real caption.
        synthetic_embeddings: embeddings [S, D] of the synthetic captions by kind.
        uid: identifier of the pair in all copies of the data; by default the key.
        sha256: SHA-256 hash of the encoded image; omitted if empty.
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
        """Return the content of the members by kind; arguments as in `write_shard`.

        Raises:
            UserError: If there are several kinds of synthetic captions, which version 1 does not support.
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
            raise UserError(
                f"Expected one kind of synthetic captions in version 1, got {len(self.synthetic_embeddings)}: write "
                "version 2."
            )
        return arrays | {"text_emb": torch.cat([self.text_embeddings, *self.synthetic_embeddings.values()])}


def write_shard(
    path: str | Path,
    records: Iterable[ReinforcedRecord],
    version: Version = 1,
    embeddings: EmbeddingFormat = "npz",
) -> None:
    """Write a shard atomically.

    Args:
        path: path of the tar file.
        records: the samples.
        version: version of the layout: 1 stores all text embeddings in one array and supports one kind of synthetic
            captions, 2 has an array for each kind.
        embeddings: "npz" stores float32 without compression, so that single rows can be read; "pth.gz" stores
            bfloat16.
    """
    with ShardFile(path) as shard:
        for record in records:
            shard.add(record.key, record.members(version, embeddings))
        shard.finish()


class ShardFile:
    """Writer of a tar file, sample by sample; the file gets its name once it is complete and on the disk.

    The index `<name>.index.json` is written beside the file. It has the byte offsets of each sample, so that a reader
    does not read all headers, and remarks of the writer. Without `finish`, no file remains.

    Args:
        path: path of the tar file.
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
            key: prefix of the names of the members.
            members: content of the members by kind.
        """
        self._keys.append(key)
        self._starts.append(self._tar.offset)
        for kind, content in members.items():
            member = tarfile.TarInfo(f"{key}.{kind}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))
        self._stops.append(self._tar.offset)

    def finish(self, **remarks: Any) -> None:
        """Complete the shard, and rename it and its index to their final names.

        Args:
            **remarks: plain data for the index.
        """
        self._tar.close()
        sync(self._staged)
        index = {"bytes": self._staged.stat().st_size, "keys": self._keys, "start": self._starts, "stop": self._stops}
        # The index is written first, so that every shard that exists is complete and has an index.
        with replacing(index_beside(self.path)) as staged:
            staged.write_text(json.dumps(index | remarks), encoding="utf-8")
        swap_in(self._staged, self.path)

    def discard(self) -> None:
        """Remove an unfinished shard."""
        self._tar.close()
        remove(self._staged)


def _encoded(arrays: dict[str, torch.Tensor], embeddings: EmbeddingFormat) -> bytes:
    content = io.BytesIO()
    if embeddings == "npz":
        np.savez(content, **{name: rows.float().numpy() for name, rows in arrays.items()})  # type: ignore[arg-type]
        return content.getvalue()
    torch.save({name: rows.to(torch.bfloat16).clone() for name, rows in arrays.items()}, content)
    return gzip.compress(content.getvalue(), compresslevel=1, mtime=0)  # mtime=0: equal bytes for equal content
