"""Types shared by the reinforcement module, its datamodule and `ReinforcementWriter`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class LeftOut(NamedTuple):
    """A row without a sample, and the cause."""

    row: int
    cause: str
    name: str


class Reinforced(NamedTuple):
    """Result of `predict_step`: samples by their rows, and the rows without a sample.

    A sample has `key`, `image_embeddings` [A, D], `text_embeddings` [1, D], `synthetic_embeddings` (tensors [S, D] by
    kind), and `members(version, embeddings)`, its files by kind.
    """

    records: dict[int, Any]
    left_out: list[LeftOut]


class Shard(Protocol):
    """A file that is written sample by sample."""

    def add(self, key: str, members: dict[str, bytes]) -> None:
        """Append a sample."""

    def finish(self, **remarks: Any) -> None:
        """Complete the file and rename it to its final name; remarks are kept beside it."""

    def discard(self) -> None:
        """Remove the unfinished file."""


class ReinforcementData(Protocol):
    """Interface of the datamodule for the writer; in this package `ReinforcementDataModule`."""

    folder: Path
    shard_size: int
    shards: int
    missing_rows: int
    version: int
    embeddings: str

    def shard_rows(self, number: int) -> range:
        """Return the rows of a shard."""

    def shard_path(self, number: int) -> Path:
        """Return the file of a shard."""

    def open_shard(self, number: int) -> Shard:
        """Start a shard."""

    def bytes_per_sample(self, width: int, captions: int | None) -> float:
        """Return the size of a sample in its shard."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide the content of the shards."""

    def reread(self, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield random samples of finished shards: as a batch, and as written (`image`, `text`, `name`)."""
