"""What passes between the module, the datamodule and `ReinforcementWriter`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class LeftOut(NamedTuple):
    """A row of which nothing is written."""

    row: int
    cause: str
    name: str


class Reinforced(NamedTuple):
    """What `predict_step` returns: samples by their rows, and the rows that gave none.

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
        """Complete the file and give it its name; remarks are kept beside it."""

    def discard(self) -> None:
        """Remove what was not finished."""


class ReinforcementData(Protocol):
    """What the writer asks of the datamodule; that of this package is `ReinforcementDataModule`."""

    folder: Path
    shard_size: int
    shards: int
    missing_rows: int
    version: int
    embeddings: str

    def shard_rows(self, number: int) -> range:
        """The rows of a shard."""

    def shard_path(self, number: int) -> Path:
        """The file of a shard."""

    def open_shard(self, number: int) -> Shard:
        """Start a shard."""

    def bytes_per_sample(self, width: int, captions: int | None) -> float:
        """Size of a sample in its shard."""

    def settings(self) -> dict[str, Any]:
        """What decides the content of the shards."""

    def reread(self, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
        """Random samples of finished shards: as a batch, and as they stand (`image`, `text`, `place`)."""
