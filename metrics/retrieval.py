"""Image-text retrieval from features alone: candidates, ranks, recall and median ranks.

Shapes: I images, T texts, E embedding dimension, k candidates of a row.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .finite import non_finite_last

RECALLS = (1, 5, 10)
_SCORES = 2**26
"""Similarities that are in memory at a time, 256 MiB."""
_CHUNK = 1024
"""Images whose similarities to all texts are computed at a time, unless these are more than `_SCORES`."""


@dataclass(frozen=True)
class Matches:
    """Matching images and texts.

    Attributes:
        image_id: long [I].
        text_image_id: long [T], id of each text's image.
        text_id: long [T], equal for equal texts. If given, an image also matches texts that equal one of its own.
    """

    image_id: Tensor
    text_image_id: Tensor
    text_id: Tensor | None = None

    def block(self, rows: slice) -> Tensor:
        """Return the matches of some images and all texts, boolean [i, T]."""
        match = self.image_id[rows, None] == self.text_image_id
        if self._groups is None:
            return match
        own_groups = torch.zeros(len(match), len(self.text_image_id))
        return (own_groups.index_add_(1, self._groups, match.float()) > 0)[:, self._groups]

    def pairs(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return whether pairs match, boolean, for indices of images and texts of broadcastable shapes."""
        if self._groups is None:
            return self.image_id[images] == self.text_image_id[texts]
        return torch.isin(self._codes(self.image_id[images], texts), self._text_codes)

    @property
    def repeated_texts(self) -> int:
        """Number of texts that are equal to a text of another image; 0 if `text_id` is not given."""
        if self._groups is None:
            return 0
        owners = torch.stack([self._groups, self.text_image_id], 1).unique(dim=0)[:, 0]
        return int((owners.bincount(minlength=1) > 1)[self._groups].sum())

    def first_texts(self) -> Tensor:
        """Return the index of the first text of each image that has texts, long."""
        texts = len(self.text_image_id)
        ids, owner = self.text_image_id.unique(return_inverse=True)
        first = torch.full((len(ids),), texts).scatter_reduce(0, owner, torch.arange(texts), "amin")
        return first.sort().values

    def of_texts(self, texts: Tensor) -> "Matches":
        """Return the matches of some of the texts, given by index, long [t]."""
        return Matches(self.image_id, self.text_image_id[texts], None if self.text_id is None else self.text_id[texts])

    @cached_property
    def _groups(self) -> Tensor | None:
        return None if self.text_id is None else self.text_id.unique(return_inverse=True)[1]

    def _codes(self, image_id: Tensor, texts: Tensor) -> Tensor:
        assert self._groups is not None
        number = torch.searchsorted(self._image_ids, image_id.contiguous())
        return number * len(self.text_image_id) + self._groups[texts]

    @cached_property
    def _image_ids(self) -> Tensor:
        return torch.cat([self.image_id, self.text_image_id]).unique()

    @cached_property
    def _text_codes(self) -> Tensor:
        return self._codes(self.text_image_id, torch.arange(len(self.text_image_id)))


def retrieval_ranks(image_features: Tensor, text_features: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
    """Return the rank of the best match of every image among the texts, and of every text among the images.

    A wrong candidate with the score of the best match ranks before the match, so that equal features for everything
    have no recall. A match with a non-finite score ranks last.

    Args:
        image_features: [I, E].
        text_features: [T, E].
        matches: Matching images and texts.

    Returns:
        long [I] and long [T], ranks from 0. A row without a match of finite score gets the number of candidates.
    """
    images = len(image_features)
    texts = len(text_features)
    image_ranks = torch.full((images,), texts)
    best = torch.full((texts,), -torch.inf, dtype=image_features.dtype)
    for rows in _blocks(images, texts):
        scores = _similarities(image_features[rows], text_features)
        match = matches.block(rows)
        image_ranks[rows] = _rank_of_best_match(scores, match, texts)
        best = torch.maximum(best, scores.masked_fill(~match, -torch.inf).amax(0))
    text_ranks = torch.zeros(texts, dtype=torch.long)
    for rows in _blocks(images, texts):
        scores = _similarities(image_features[rows], text_features)
        match = matches.block(rows)
        text_ranks += ((scores >= best) & ~match).sum(0)
    return image_ranks, text_ranks.masked_fill(best == -torch.inf, images)


def _blocks(images: int, texts: int) -> list[slice]:
    """Return images in blocks whose similarities to all texts are held at a time."""
    size = min(_CHUNK, max(_SCORES // max(texts, 1), 1))
    return [slice(start, start + size) for start in range(0, images, size)]


def _similarities(image_features: Tensor, text_features: Tensor) -> Tensor:
    return non_finite_last(image_features @ text_features.T)


def _rank_of_best_match(scores: Tensor, match: Tensor, last: int) -> Tensor:
    """Return ranks for scores of `non_finite_last`; `last` where no match has a finite score."""
    best = scores.masked_fill(~match, -torch.inf).amax(1, keepdim=True)
    return ((scores >= best) & ~match).sum(1).masked_fill(best[:, 0] == -torch.inf, last)


@dataclass
class Candidates:
    """The k nearest of every row in one direction, best first.

    Attributes:
        index: long [R, k], indices of the candidates.
        similarity: [R, k], dot products of the features; minus infinity for non-finite ones.
        match_score: [R, k], scores of a matching head; None without one.
    """

    index: Tensor
    similarity: Tensor
    match_score: Tensor | None = None

    def reordered(self, match_score: Tensor, order_by: Tensor) -> "Candidates":
        """Return the same candidates with their matching scores, highest `order_by` [R, k] first."""
        order = order_by.argsort(dim=1, descending=True, stable=True)
        return Candidates(self.index.gather(1, order), self.similarity.gather(1, order), match_score.gather(1, order))


def nearest_candidates(image_features: Tensor, text_features: Tensor, k: int) -> tuple[Candidates, Candidates]:
    """Return the k nearest texts of every image, and the k nearest images of every text (fewer where there are fewer).

    Args:
        image_features: [I, E].
        text_features: [T, E].
        k: Number of candidates of a row.
    """
    images = len(image_features)
    texts = len(text_features)
    text_parts = [torch.zeros(0, texts).topk(min(k, texts), 1)]  # there may be no image at all
    index = torch.zeros(0, texts, dtype=torch.long)
    similarity = torch.zeros(0, texts, dtype=image_features.dtype)
    for rows in _blocks(images, texts):
        scores = _similarities(image_features[rows], text_features)
        text_parts.append(scores.topk(min(k, texts), 1))
        # Only the best of a block can be among the best of all.
        of_block = scores.topk(min(k, len(scores)), 0)
        similarity = torch.cat([similarity, of_block.values])
        best = similarity.topk(min(k, len(similarity)), 0)
        index = torch.cat([index, of_block.indices + rows.start]).gather(0, best.indices)
        similarity = best.values
    near_texts = Candidates(
        torch.cat([block.indices for block in text_parts]), torch.cat([p.values for p in text_parts])
    )
    return near_texts, Candidates(index.T.contiguous(), similarity.T.contiguous())


def reranked_ranks(order_by: Tensor, match: Tensor, ranks: Tensor, last: int) -> Tensor:
    """Return the rank of the best match after the candidates of each row are reordered.

    Args:
        order_by: New scores of the candidates [R, k]; minus infinity for non-finite ones.
        match: Matching candidates, boolean [R, k].
        ranks: Ranks before, long [R]; they stay for rows without a match among the candidates.
        last: Rank if no match has a finite score: the size of the other side.

    Returns:
        long [R], from 0.
    """
    return torch.where(match.any(1), _rank_of_best_match(order_by, match, last), ranks)


def recalls(image_ranks: Tensor, text_ranks: Tensor) -> dict[str, float]:
    """Return recall at 1, 5 and 10 in both directions and the mean of the six, in percent.

    Args:
        image_ranks: Ranks of the images' best matches, as from `retrieval_ranks`.
        text_ranks: Ranks of the texts' best matches.
    """
    result = {}
    for direction, ranks, others in (
        ("text_to_image", text_ranks, image_ranks),
        ("image_to_text", image_ranks, text_ranks),
    ):
        for k in RECALLS:
            # The number of candidates is the rank of a match that is not found, also if there are fewer than k.
            result[f"{direction}_r{k}"] = 100 * (ranks < min(k, len(others))).double().mean().item()
    result["recall_mean"] = sum(result.values()) / len(result)
    return result


def chance_recalls(matches: Matches) -> dict[str, float]:
    """Return what `recalls` gives on average for candidates in random order, in percent, by the same names.

    Of m matches among n candidates none is among the first k with probability C(n - m, k) / C(n, k).
    """
    images = len(matches.image_id)
    texts = len(matches.text_image_id)
    of_images = torch.zeros(images, dtype=torch.long)
    of_texts = torch.zeros(texts, dtype=torch.long)
    for rows in _blocks(images, texts):
        block = matches.block(rows)
        of_images[rows] = block.sum(1)
        of_texts += block.sum(0)
    result = {}
    for direction, right, others in (("text_to_image", of_texts, images), ("image_to_text", of_images, texts)):
        misses = torch.ones(len(right), dtype=torch.float64)
        for position in range(min(RECALLS[-1], others)):
            misses *= (others - right - position).clamp(min=0) / (others - position)
            if position + 1 in RECALLS:
                result[f"{direction}_r{position + 1}"] = 100 * (1 - misses.mean().item())
        result |= {f"{direction}_r{k}": 100 * (1 - misses.mean().item()) for k in RECALLS if k > others}
    result["recall_mean"] = sum(result.values()) / len(result)
    return result


def average_median_ranks(
    image_features: Tensor, text_features: Tensor, matches: Matches, fold: int = 1000
) -> dict[str, float]:
    """Return the median rank of the right candidate in both directions, averaged over small one-to-one retrievals.

    Images are split into folds in their given order; the last incomplete fold is used only if no fold is complete. Each
    fold is evaluated with the first caption of every image, then with the second one, and so on as long as all images
    have captions. Ranks count from 1, and ties count against the model as in `retrieval_ranks`: a perfect model has 1,
    an untrained one about half a fold, and one with non-finite features a rank after the last of the fold. Images
    without a caption are skipped.

    Args:
        image_features: [I, E].
        text_features: [T, E], the captions of each image in their order.
        matches: Matching images and texts.
        fold: Number of images of a fold.

    Returns:
        `median_rank_text_to_image` and `median_rank_image_to_text`.

    Raises:
        ValueError: If no image has a caption.
    """
    by_image = matches.text_image_id.argsort(stable=True)
    owners = matches.text_image_id[by_image]
    start = torch.searchsorted(owners, matches.image_id)
    captions = torch.searchsorted(owners, matches.image_id, right=True) - start
    images = captions.nonzero()[:, 0]
    if not len(images):
        raise ValueError(
            f"Expected a caption to rank, got none for any of {len(captions)} images: check the images' ids."
        )
    medians = []
    for rows in [rows for rows in images.split(fold) if len(rows) == fold] or [images]:
        for caption in range(int(captions[images].min())):
            texts = by_image[start[rows] + caption]
            pairs = replace(matches.of_texts(texts), image_id=matches.image_id[rows])
            ranks = retrieval_ranks(image_features[rows], text_features[texts], pairs)
            medians.append([1 + direction.double().quantile(0.5).item() for direction in ranks])
    image_to_text, text_to_image = (sum(values) / len(values) for values in zip(*medians, strict=True))
    return {"median_rank_text_to_image": text_to_image, "median_rank_image_to_text": image_to_text}
