"""Features of images and texts, collected over all processes, and the result of a retrieval evaluation."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ...callbacks.distributed.collectives import gather_uneven
from ...metrics.finite import some_of
from ...metrics.retrieval import Candidates, Matches
from .rows import CollectedRows

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
    """Collect features in main memory, so that the memory of a GPU does not limit the size of an evaluation set.

    Where they are many they are in files: those of this process, and those of all processes, once for each machine.
    """

    def __init__(self) -> None:
        self._rows: dict[str, CollectedRows] = {name: CollectedRows() for name in Gathered._fields}

    def add_images(self, features: Tensor, image_id: Tensor, sample_index: Tensor) -> None:
        """Add images: features [B, E], ids and positions long [B]."""
        self._add(image_features=features.detach().float(), image_id=image_id, sample_index=sample_index)

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
        self._add(
            text_features=features.detach().float(),
            text_image_id=unknown if image_id is None else image_id,
            text_id=unknown if text_id is None else text_id,
            text_index=unknown if text_index is None else text_index,
            input_ids=input_ids,
            attention_mask=attention_mask,
        )

    def _add(self, **columns: Tensor) -> None:
        for name, column in columns.items():
            self._rows[name].add(column.cpu())

    def gather(self, width: int | None = None) -> Gathered:
        """Return the features of all processes; every process must call this.

        Args:
            width: width of the features, if known.
        """
        # A process without batches gets the widths from the others.
        widths = [self._rows[name].width for name in ("image_features", "text_features", "input_ids")]
        images, texts, longest = gather_uneven(torch.tensor([widths])).amax(0).tolist()
        features = torch.zeros(0, max(images, texts) if width is None else width)
        ids = torch.zeros(0, longest, dtype=torch.long)
        wide = {"image_features": features, "text_features": features, "input_ids": ids, "attention_mask": ids}
        number = torch.zeros(0, dtype=torch.long)
        return Gathered._make(rows.gathered(wide.get(name, number)) for name, rows in self._rows.items())
