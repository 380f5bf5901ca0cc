"""Re-ranking of retrieval candidates by a matching head that processes image and text together.

Every image is encoded once, by the process that reads it, which stores its tokens and scores its pairs. Each pair is
scored once, also if it is a candidate in both directions.

Shapes: I images, T texts, N image tokens, V image width, L text tokens, D text width, k candidates of a row.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from ...callbacks.distributed.collectives import all_reduce_sum, gather_uneven, rank
from ...common.ranges import COUNT, NOT_NEGATIVE, SettingsGroup
from ...metrics.retrieval import Candidates

RerankWhen = Literal["never", "test", "always"]
RerankScore = Literal["itm", "itm+itc", "itm+itc_logits"]

SECONDS_OF_A_LINE = 30.0
"""Seconds between two lines about the share of the pairs that is scored, as between those of `ProgressLines`."""


@dataclass(frozen=True)
class RerankSettings(SettingsGroup, option="rerank"):
    """Re-ranking of retrieval candidates by the matching head.

    Args:
        k: number of candidates by contrast that the matching head reorders; 0 disables re-ranking.
        when: "test" re-ranks in `test`, "always" in validation too. `predict` re-ranks if the last evaluation that did
            so had a higher mean recall in that order; without such an evaluation only if this is "always".
        score: "itm" is the logit of a match; "itm+itc" adds the cosine, "itm+itc_logits" the cosine over the
            temperature.
        memory_gib: main memory in GiB that a process may use for image tokens, and again for text states; the rest is
            kept in a temporary file.
        rows: texts that pass through the matching head at a time.
    """

    k: Annotated[int, NOT_NEGATIVE] = 128
    when: RerankWhen = "test"
    score: RerankScore = "itm"
    memory_gib: Annotated[float, NOT_NEGATIVE] = 8.0
    rows: Annotated[int, COUNT] = 256

    def applies(self, stage: str) -> bool:
        """Return whether candidates are re-ranked in a stage ("validate" or "test")."""
        stages = {"never": (), "test": ("test",), "always": ("validate", "test")}
        return self.k > 0 and stage in stages[self.when]


NO_RERANKING = RerankSettings(k=0)


@dataclass(frozen=True)
class Orders:
    """Mean recall of the same candidates in two orders, in an evaluation that re-ranked.

    Args:
        contrast: mean recall in the order by contrast, in percent.
        reranked: mean recall in the order of the matching head, in percent.
    """

    contrast: float
    reranked: float

    @property
    def reranks(self) -> bool:
        """Whether the order of the matching head is the better one."""
        return self.reranked > self.contrast

    def __str__(self) -> str:
        return f"mean recall was {self.contrast:.1f} by contrast alone and {self.reranked:.1f} after re-ranking"


class PairScorer(Protocol):
    """A model that scores how well a text matches an image."""

    device: torch.device

    def text_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode ids and mask [B, L] as text states [B, L, D] for `match_scores`."""

    def match_scores(self, text_states: Tensor, attention_mask: Tensor, image_tokens: Tensor) -> Tensor:
        """Return scores [R] of R texts, [R, L, D] with mask [R, L], for one image [1, N, V]."""


class TokenStore:
    """Rows of tokens, in main memory up to a limit and beyond it in a temporary file that is mapped into memory.

    Args:
        limit: bytes of main memory; further rows are on disk, in the folder for temporary files.
    """

    def __init__(self, limit: float) -> None:
        self._free_bytes = limit
        self._rows: list[Tensor] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Tensor:
        return self._rows[row]

    def append(self, rows: Tensor) -> None:
        """Add tokens [B, N, V] from any device."""
        size = rows.numel() * rows.element_size()
        if size <= self._free_bytes:
            self._free_bytes -= size
            stored = rows.detach().to("cpu", copy=True)
        elif size:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="vlightning-tokens-")
            file = Path(self._folder.name) / str(len(self._rows))
            stored = torch.from_file(str(file), shared=True, size=rows.numel(), dtype=rows.dtype).view(rows.shape)
            stored.copy_(rows)
        else:
            return
        self._rows.extend(stored.unbind())

    @property
    def on_disk(self) -> bool:
        """Whether the limit was exceeded."""
        return self._folder is not None


def match_candidates(
    scorer: PairScorer,
    near_texts: Candidates,
    near_images: Candidates,
    stored_tokens: TokenStore,
    input_ids: Tensor,
    attention_mask: Tensor,
    rows: int,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """Score every candidate of both directions.

    A process stores the tokens of its own images and the states of all texts, (I / processes) * N * V and T * L * D
    values: up to `limit` bytes of each in main memory and the rest in a temporary file. A pass processes one image and
    at most `rows` texts; three tensors are copied to the device for it, and the host waits for all scores at the end.

    Args:
        scorer: the model; every process calls it equally often, because a sharded model communicates.
        near_texts: candidates of every image of all processes, rank 0's images first.
        near_images: candidates of every text of all processes.
        stored_tokens: tokens of this process's images, in their order.
        input_ids: token ids of all texts, long [T, L].
        attention_mask: long [T, L].
        rows: maximum number of texts of a pass.
        limit: bytes of main memory for the states of the texts.

    Returns:
        The scores of `near_texts` [I, k] and of `near_images` [T, k], the same in every process.
    """
    counts = gather_uneven(torch.tensor([len(stored_tokens)]))
    first = int(counts[: rank()].sum())
    states = _encode_texts(scorer, input_ids, attention_mask, rows, limit)

    # Texts to score for each image of this process: its candidates, and the texts that it is a candidate of.
    asking, column_of = _inverse(near_images.index, len(near_texts.index))
    # Not the default type, which is that of the weights in some precisions.
    text_scores = torch.zeros(near_images.index.shape, dtype=torch.float32)
    image_scores = torch.zeros(len(stored_tokens), near_texts.index.shape[1], dtype=torch.float32)
    passes = list(_passes(near_texts.index, asking, first, len(stored_tokens), rows))
    scored: list[list[Tensor]] = [[] for _ in range(len(stored_tokens))]
    shape = _shape_everywhere(stored_tokens)
    most_passes = int(gather_uneven(torch.tensor([len(passes)])).max())
    last_line = time.monotonic()
    for number in range(most_passes):
        if time.monotonic() - last_line > SECONDS_OF_A_LINE:
            last_line = time.monotonic()
            rank_zero_info(f"Re-ranking: {number / most_passes:.0%} of the pairs of candidates are scored.")
        idle = number >= len(passes)
        image, texts = (0, torch.zeros(1, dtype=torch.long)) if idle else passes[number]
        tokens = torch.zeros(shape, dtype=states[0].dtype) if idle else stored_tokens[image]
        length = int(attention_mask[texts].sum(1).max())
        scores = scorer.match_scores(
            torch.stack([states[int(text)][:length] for text in texts]).to(scorer.device),
            attention_mask[texts, :length].to(scorer.device),
            tokens[None].to(scorer.device),
        )
        if not idle:
            scored[image].append(scores.float())
    # Copied at once: with a copy in every pass, the device would wait for the host to prepare the next one.
    all_scores = (
        torch.cat([scores for of_image in scored for scores in of_image]).cpu() if passes else text_scores.new_zeros(0)
    )
    for image, scores in enumerate(all_scores.split([sum(map(len, of_image)) for of_image in scored])):
        texts = _texts_of(near_texts.index[first + image], asking[first + image])
        image_scores[image] = scores[torch.searchsorted(texts, near_texts.index[first + image])]
        asking_texts = asking[first + image]
        text_scores[asking_texts, column_of[first + image]] = scores[torch.searchsorted(texts, asking_texts)]
    return gather_uneven(image_scores), all_reduce_sum(text_scores)


def _encode_texts(scorer: PairScorer, input_ids: Tensor, attention_mask: Tensor, rows: int, limit: float) -> TokenStore:
    """Encode all texts in every process, which is cheap compared with the pairs and needs no gathering."""
    states = TokenStore(limit)
    for start in range(0, len(input_ids), rows):
        texts = slice(start, start + rows)
        states.append(scorer.text_states(input_ids[texts].to(scorer.device), attention_mask[texts].to(scorer.device)))
    return states


def _inverse(candidates: Tensor, images: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows and columns of each image in `candidates` [T, k]."""
    flat = candidates.flatten()
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=images).tolist()
    width = max(candidates.shape[1], 1)
    return list((order // width).split(sizes)), list((order % width).split(sizes))


def _texts_of(near: Tensor, asking: Tensor) -> Tensor:
    return torch.cat([near, asking]).unique()  # sorted


def _passes(
    near_texts: Tensor, asking: list[Tensor], first: int, images: int, rows: int
) -> Iterator[tuple[int, Tensor]]:
    for image in range(images):
        for texts in _texts_of(near_texts[first + image], asking[first + image]).split(rows):
            yield image, texts


def _shape_everywhere(stored_tokens: TokenStore) -> list[int]:
    """Return the shape [N, V] of an image's tokens, also in a process without images."""
    shape = list(stored_tokens[0].shape) if len(stored_tokens) else [0, 0]
    everywhere: list[int] = gather_uneven(torch.tensor([shape])).amax(0).tolist()
    return everywhere
