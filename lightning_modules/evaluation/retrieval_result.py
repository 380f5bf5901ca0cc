"""Features of images and texts, collected over all processes, and the result of a retrieval evaluation."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad

from ...callbacks.distributed.collectives import gather_uneven
from ...metrics.finite import some_of
from ...metrics.retrieval import Candidates, Matches

UNKNOWN = torch.iinfo(torch.long).min
"""Id of unknown values, which no data has."""


class HardPairs(NamedTuple):
    """How often a match is ranked above the nearest wrong candidate, over the images and texts that have both.

    The matching head did not choose the candidate, so without training it is right in half of the cases.
    """

    pairs: int
    contrast: float  # share of the pairs in the right order by contrast, in percent
    head: float  # share in the right order by the matching head

    @property
    def at_chance(self) -> bool:
        """Whether the matching head is less than two standard errors better than chance."""
        return self.head < 50 + 100 / self.pairs**0.5


@dataclass
class RetrievalResult:
    """Result of one evaluation or prediction, equal in every process.

    Attributes:
        recalls: recall in percent and median ranks, by name; empty if the matches are unknown.
        image_features: float32 [I, E], of the prediction space.
        text_features: float32 [T, E], of the same space.
        sample_index: long [I], positions of the images in their data set.
        input_ids: long [T, L], padded with 0.
        attention_mask: long [T, L].
        text_index: long [T], position of a text in its list; negative for captions of the images.
        near_texts: candidates of every image in the final order, in the same space.
        near_images: candidates of every text in the final order.
        matches: matching images and texts; None if unknown.
        non_finite_images: long, `sample_index` of the images with a non-finite feature in any space.
        non_finite_texts: long, `text_index` of such texts, or the image's id if unknown.
        non_finite_scores: number of non-finite scores of the matching head, of both directions.
        equal_matches: matches in which an image also matches texts that are equal to one of its own; None where they
            are the same, or are not measured beside `matches`.
        hard_pairs: accuracy of the matching head, by `equal_matches` if there are any; None without re-ranking.
    """

    recalls: dict[str, float]
    image_features: Tensor
    text_features: Tensor
    sample_index: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    text_index: Tensor
    near_texts: Candidates
    near_images: Candidates
    matches: Matches | None
    non_finite_images: Tensor
    non_finite_texts: Tensor
    non_finite_scores: int = 0
    equal_matches: Matches | None = None
    hard_pairs: HardPairs | None = None

    @property
    def non_finite(self) -> dict[str, float]:
        """Return the numbers of non-finite images, texts and scores, by name; empty if all are finite."""
        counts = {
            "non_finite_images": len(self.non_finite_images),
            "non_finite_texts": len(self.non_finite_texts),
            "rerank_non_finite_scores": self.non_finite_scores,
        }
        return {name: float(count) for name, count in counts.items() if count}

    def warn(self) -> None:
        """Warn of non-finite features and scores, and name the samples."""
        problems = [
            f"features of {len(numbers)} of {total} {what} ({name} {some_of(numbers[numbers != UNKNOWN])})"
            for numbers, total, what, name in (
                (self.non_finite_images, len(self.image_features), "images", "sample_index"),
                (self.non_finite_texts, len(self.text_features), "texts", "text_index or image_id"),
            )
            if len(numbers)
        ]
        if self.non_finite_scores:
            problems.append(f"{self.non_finite_scores} scores of the matching head")
        if problems:
            rank_zero_warn(
                f"Found non-finite {' and '.join(problems)}: these rank last, which lowers all recall; check these "
                "samples, or, if all are affected, use an earlier checkpoint."
            )


class Gathered(NamedTuple):
    """The collected features of all processes, those of rank 0 first."""

    image_features: Tensor  # float32 [I, E]
    image_id: Tensor  # long [I]
    sample_index: Tensor  # long [I]
    text_features: Tensor  # float32 [T, E]
    text_image_id: Tensor  # long [T], id of the image that a text belongs to
    text_id: Tensor  # long [T], equal for equal texts
    text_index: Tensor  # long [T]
    input_ids: Tensor  # long [T, L], padded with 0
    attention_mask: Tensor  # long [T, L]


class CollectedFeatures:
    """Collect features in main memory, so that the memory of a GPU does not limit the size of an evaluation set."""

    def __init__(self) -> None:
        self._images: list[tuple[Tensor, ...]] = []
        self._texts: list[tuple[Tensor, ...]] = []
        self._ids: list[tuple[Tensor, Tensor]] = []

    def add_images(self, features: Tensor, image_id: Tensor, sample_index: Tensor) -> None:
        """Add images: features [B, E], ids and positions long [B]."""
        self._images.append((features.detach().float().cpu(), image_id.cpu(), sample_index.cpu()))

    def add_texts(
        self,
        features: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        image_id: Tensor | None,
        text_id: Tensor | None,
        text_index: Tensor | None,
    ) -> None:
        """Add texts: features [T, E], ids and mask [T, L]; id of the image, of equal texts, and position, long [T]."""
        unknown = torch.full((len(features),), UNKNOWN)
        columns = [unknown if column is None else column.cpu() for column in (image_id, text_id, text_index)]
        self._texts.append((features.detach().float().cpu(), *columns))
        self._ids.append((input_ids.cpu(), attention_mask.cpu()))

    def gather(self, width: int | None = None) -> Gathered:
        """Return the features of all processes; every process must call this.

        Args:
            width: width of the features, if known.
        """
        if width is None:
            # A process without batches gets the width from the others.
            widths = [batches[0][0].shape[1] for batches in (self._images, self._texts) if batches]
            width = int(gather_uneven(torch.tensor([max(widths, default=0)])).max())
        images = _joined(self._images, width, columns=3)
        texts = _joined(self._texts, width, columns=4)
        return Gathered._make([*images, *texts, *_joined_ids(self._ids)])


def _joined(batches: list[tuple[Tensor, ...]], width: int, columns: int) -> list[Tensor]:
    """Join the batches of this process, then of all processes; the first column contains features, the others ids."""
    if batches:
        joined = [torch.cat(column) for column in zip(*batches, strict=True)]
    else:
        joined = [torch.zeros(0, width)] + [torch.zeros(0, dtype=torch.long)] * (columns - 1)
    return [gather_uneven(column) for column in joined]


def _joined_ids(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return token ids and masks of all processes, padded to the longest text."""
    longest = int(gather_uneven(torch.tensor([max((ids.shape[1] for ids, _ in batches), default=0)])).max())
    none = torch.zeros(0, longest, dtype=torch.long)
    ids, masks = (
        torch.cat([none, *(pad(batch[column], (0, longest - batch[column].shape[1])) for batch in batches)])
        for column in (0, 1)
    )
    return gather_uneven(ids), gather_uneven(masks)
