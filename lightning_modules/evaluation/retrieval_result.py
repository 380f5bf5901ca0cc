"""Result of a retrieval evaluation or prediction."""

from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ...metrics.finite import some_of
from ...metrics.retrieval import Candidates, Matches

UNKNOWN = torch.iinfo(torch.long).min
"""Id of unknown values, which no data has."""


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
        found = [
            f"features of {len(numbers)} of {total} {what} ({name} {some_of(numbers[numbers != UNKNOWN])})"
            for numbers, total, what, name in (
                (self.non_finite_images, len(self.image_features), "images", "sample_index"),
                (self.non_finite_texts, len(self.text_features), "texts", "text_index or image_id"),
            )
            if len(numbers)
        ]
        if self.non_finite_scores:
            found.append(f"{self.non_finite_scores} scores of the matching head")
        if found:
            rank_zero_warn(
                f"Found non-finite {' and '.join(found)}: these rank last, which lowers all recall; check these "
                "samples, or, if all are affected, use an earlier checkpoint."
            )
