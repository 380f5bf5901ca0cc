"""Image-text retrieval, shared by all methods: candidates, ranks, recall and median ranks from features alone.

Shapes: I images, T texts, E feature width, k candidates of a row.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .finite import non_finite_last

RECALLS = (1, 5, 10)
# Images whose similarities to all texts are held at a time: 1024 rows by 25,000 texts are 100 MB.
_CHUNK = 1024


@dataclass(frozen=True)
class Matches:
    """Which texts belong to which images.

    Attributes:
        image_id: long [I].
        text_image_id: long [T], id of the image that the text belongs to.
        text_id: long [T], equal for equal texts. If given, an image also matches the texts that equal one of its own.
    """

    image_id: Tensor
    text_image_id: Tensor
    text_id: Tensor | None = None

    def block(self, rows: slice) -> Tensor:
        """Boolean [i, T] for some images and all texts."""
        match = self.image_id[rows, None] == self.text_image_id
        if self._groups is None:
            return match
        own_groups = torch.zeros(len(match), len(self.text_image_id))
        return (own_groups.index_add_(1, self._groups, match.float()) > 0)[:, self._groups]

    def pairs(self, images: Tensor, texts: Tensor) -> Tensor:
        """Boolean, for the pairs of image and text numbers in two long tensors of broadcastable shapes."""
        if self._groups is None:
            return self.image_id[images] == self.text_image_id[texts]
        return torch.isin(self._codes(self.image_id[images], texts), self._own_codes)

    def first_texts(self) -> Tensor:
        """Numbers of the first text of each image, long; of an image without texts there is none."""
        texts = len(self.text_image_id)
        ids, owner = self.text_image_id.unique(return_inverse=True)
        first = torch.full((len(ids),), texts).scatter_reduce(0, owner, torch.arange(texts), "amin")
        return first.sort().values

    def of_texts(self, texts: Tensor) -> "Matches":
        """The same for some of the texts, long [t]."""
        return Matches(self.image_id, self.text_image_id[texts], None if self.text_id is None else self.text_id[texts])

    @cached_property
    def _groups(self) -> Tensor | None:
        return None if self.text_id is None else self.text_id.unique(return_inverse=True)[1]

    def _codes(self, image_id: Tensor, texts: Tensor) -> Tensor:
        assert self._groups is not None
        number = torch.searchsorted(self._known_ids, image_id.contiguous())
        return number * len(self.text_image_id) + self._groups[texts]

    @cached_property
    def _known_ids(self) -> Tensor:
        return torch.cat([self.image_id, self.text_image_id]).unique()

    @cached_property
    def _own_codes(self) -> Tensor:
        return self._codes(self.text_image_id, torch.arange(len(self.text_image_id)))


def retrieval_ranks(image_features: Tensor, text_features: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
    """Rank of the best match of every image among the texts, and of every text among the images.

    A candidate that is no match and scores as high as the best match ranks before it, so a model that gives
    everything the same feature gets no recall. Nor does one whose features are infinite or not a number: what has such
    a score is no better than what is not there.

    Args:
        image_features: [I, E].
        text_features: [T, E].
        matches: which belong together.

    Returns:
        long [I] and long [T], ranks from 0. A row without any match of a finite score gets the number of candidates.
    """
    images, texts = len(image_features), len(text_features)
    starts = range(0, images, _CHUNK)
    image_ranks = torch.full((images,), texts)
    best = torch.full((texts,), -torch.inf, dtype=image_features.dtype)
    for rows in (slice(start, start + _CHUNK) for start in starts):
        scores, match = _similarities(image_features[rows], text_features), matches.block(rows)
        image_ranks[rows] = _rank_of_best_match(scores, match, texts)
        best = torch.maximum(best, scores.masked_fill(~match, -torch.inf).amax(0))
    text_ranks = torch.zeros(texts, dtype=torch.long)
    for rows in (slice(start, start + _CHUNK) for start in starts):
        scores, match = _similarities(image_features[rows], text_features), matches.block(rows)
        text_ranks += ((scores >= best) & ~match).sum(0)
    return image_ranks, text_ranks.masked_fill(best == -torch.inf, images)


def _similarities(image_features: Tensor, text_features: Tensor) -> Tensor:
    return non_finite_last(image_features @ text_features.T)


def _rank_of_best_match(scores: Tensor, match: Tensor, last: int) -> Tensor:
    """Of scores that have gone through `non_finite_last`; `last` where no match has a finite one."""
    best = scores.masked_fill(~match, -torch.inf).amax(1, keepdim=True)
    return ((scores >= best) & ~match).sum(1).masked_fill(best[:, 0] == -torch.inf, last)


@dataclass
class Candidates:
    """The k nearest of every row in one direction, best first.

    Attributes:
        index: long [R, k], numbers of the candidates.
        similarity: [R, k], dot products of the features; minus infinity for one that is not finite.
        match_score: [R, k], what a matching head says; None where none was asked.
    """

    index: Tensor
    similarity: Tensor
    match_score: Tensor | None = None

    def reordered(self, match_score: Tensor, order_by: Tensor) -> "Candidates":
        """The same candidates with their matching scores, highest `order_by` [R, k] first."""
        order = order_by.argsort(dim=1, descending=True, stable=True)
        return Candidates(self.index.gather(1, order), self.similarity.gather(1, order), match_score.gather(1, order))


def nearest_candidates(image_features: Tensor, text_features: Tensor, k: int) -> tuple[Candidates, Candidates]:
    """The k nearest texts of every image, and the k nearest images of every text (fewer where there are fewer).

    Args:
        image_features: [I, E].
        text_features: [T, E].
        k: candidates for a row.
    """
    images, texts = len(image_features), len(text_features)
    text_parts = [torch.zeros(0, texts).topk(min(k, texts), 1)]  # there may be no image at all
    found = Candidates(torch.zeros(texts, 0, dtype=torch.long), torch.zeros(texts, 0, dtype=image_features.dtype))
    for start in range(0, images, _CHUNK):
        scores = _similarities(image_features[start : start + _CHUNK], text_features)
        text_parts.append(scores.topk(min(k, texts), 1))
        numbers = torch.arange(start, start + len(scores)).expand(texts, -1)
        similarity = torch.cat([found.similarity, scores.T], 1)
        best = similarity.topk(min(k, similarity.shape[1]), 1)
        found = Candidates(torch.cat([found.index, numbers], 1).gather(1, best.indices), best.values)
    near_texts = Candidates(torch.cat([part.indices for part in text_parts]), torch.cat([p.values for p in text_parts]))
    return near_texts, found


def reranked_ranks(order_by: Tensor, match: Tensor, ranks: Tensor, last: int) -> Tensor:
    """Rank of the best match after the candidates of each row were put into a new order.

    Args:
        order_by: [R, k], the new scores of the candidates; minus infinity for one that is not finite.
        match: boolean [R, k], which candidates are matches.
        ranks: long [R], ranks before; they stay where no match is among the candidates.
        last: number of all that could have been candidates, the rank where no match has a finite score.

    Returns:
        long [R], from 0.
    """
    return torch.where(match.any(1), _rank_of_best_match(order_by, match, last), ranks)


def recalls(image_ranks: Tensor, text_ranks: Tensor) -> dict[str, float]:
    """Recall at 1, 5 and 10 in both directions and the mean of the six, in percent; ranks as of `retrieval_ranks`."""
    result = {}
    for direction, ranks, others in (
        ("text_to_image", text_ranks, image_ranks),
        ("image_to_text", image_ranks, text_ranks),
    ):
        for k in RECALLS:
            # The number of candidates is the rank of what is not found, be they as few as they may.
            result[f"{direction}_r{k}"] = 100 * (ranks < min(k, len(others))).double().mean().item()
    result["recall_mean"] = sum(result.values()) / len(result)
    return result


def average_median_ranks(
    image_features: Tensor, text_features: Tensor, matches: Matches, fold: int = 1000
) -> dict[str, float]:
    """Median rank of the right candidate in both directions, averaged over small one-to-one retrievals.

    Images are cut into folds in their given order; a last incomplete fold counts only where there is no complete one.
    In each fold every image stands with its first caption alone, then with its second one, and so on as far as all
    images have captions. Ranks are from 1, and ties count against the model as in `retrieval_ranks`: a perfect model
    has 1, one that knows nothing about half a fold, and one whose features are not finite comes after the last of the
    fold. Images without a caption are left out.

    Args:
        image_features: [I, E].
        text_features: [T, E], captions of an image in their order, with those of others between them or not.
        matches: which belong together.
        fold: images of a fold.

    Returns:
        `median_rank_text_to_image` and `median_rank_image_to_text`.

    Raises:
        ValueError: if no image has a caption.
    """
    by_image = matches.text_image_id.argsort(stable=True)
    owners = matches.text_image_id[by_image]
    start = torch.searchsorted(owners, matches.image_id)
    captions = torch.searchsorted(owners, matches.image_id, right=True) - start
    images = captions.nonzero()[:, 0]
    if not len(images):
        raise ValueError(
            f"Found no caption of any of {len(captions)} images, expected one to rank: check the images' ids."
        )
    medians = []
    for rows in [part for part in images.split(fold) if len(part) == fold] or [images]:
        for caption in range(int(captions[images].min())):
            texts = by_image[start[rows] + caption]
            pairs = replace(matches.of_texts(texts), image_id=matches.image_id[rows])
            ranks = retrieval_ranks(image_features[rows], text_features[texts], pairs)
            medians.append([1 + direction.double().quantile(0.5).item() for direction in ranks])
    image_to_text, text_to_image = (sum(found) / len(found) for found in zip(*medians, strict=True))
    return {"median_rank_text_to_image": text_to_image, "median_rank_image_to_text": image_to_text}
