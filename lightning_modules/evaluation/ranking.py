"""Recall and median ranks of one feature space, and recall after re-ranking."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ...metrics.finite import non_finite_last
from ...metrics.retrieval import (
    Matches,
    average_median_ranks,
    chance_recalls,
    recalls,
    reranked_ranks,
    retrieval_ranks,
)
from .reranking import RerankScore
from .retrieval_result import HardPairs, RetrievalResult

Protocol = Literal["karpathy5", "paper"]
Ranks = tuple[Tensor, Tensor]
"""Ranks of the best match of every image, long [I], and of every text, long [T]; see `retrieval_ranks`."""


def protocol_recalls(
    image_features: Tensor,
    text_features: Tensor,
    matches: Matches,
    ranks: Ranks,
    protocols: Sequence[Protocol] | None,
) -> dict[str, float]:
    """Return recall in percent, by protocol if protocols are given.

    Args:
        image_features: [I, E].
        text_features: [T, E].
        matches: matching images and texts.
        ranks: ranks among all texts.
        protocols: as in `RetrievalEvaluation`.
    """
    if protocols is None:
        return recalls(*ranks)
    by_protocol = {"karpathy5": recalls(*ranks)}
    if "paper" in protocols:
        first = matches.first_texts()
        by_protocol["paper"] = recalls(*retrieval_ranks(image_features, text_features[first], matches.of_texts(first)))
    return {f"{protocol}/{name}": value for protocol in protocols for name, value in by_protocol[protocol].items()}


def protocol_chance(matches: Matches, protocols: Sequence[Protocol] | None) -> dict[str, float]:
    """Return the chance level of each result of `protocol_recalls`."""
    if protocols is None:
        return chance_recalls(matches)
    by_protocol = {"karpathy5": chance_recalls(matches)}
    if "paper" in protocols:
        by_protocol["paper"] = chance_recalls(matches.of_texts(matches.first_texts()))
    return {f"{protocol}/{name}": value for protocol in protocols for name, value in by_protocol[protocol].items()}


def with_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return results with a prefix of their last names: `karpathy5/recall_mean` is `karpathy5/<prefix>recall_mean`."""
    names = {name: name.rpartition("/") for name in values}
    return {f"{protocol}{slash}{prefix}{last}": values[name] for name, (protocol, slash, last) in names.items()}


def fold_median_ranks(
    image_features: Tensor, text_features: Tensor, matches: Matches, sample_index: Tensor, fold: int | None
) -> dict[str, float]:
    """Return average median ranks in folds of images; empty if `fold` is None."""
    if fold is None:
        return {}
    order = sample_index.argsort(stable=True)  # independent of the process that read an image
    matches = replace(matches, image_id=matches.image_id[order])
    return average_median_ranks(image_features[order], text_features, matches, fold)


def cosine_weight(score: RerankScore, temperature: float) -> float:
    """Return the factor of the cosine that is added to the logit of a match.

    Args:
        score: score for the order.
        temperature: temperature of the contrastive logits.
    """
    return {"itm": 0.0, "itm+itc": 1.0, "itm+itc_logits": 1.0 / temperature}[score]


def rerank_candidates(
    result: RetrievalResult,
    scores: tuple[Tensor, Tensor],
    ranks: Mapping[str, tuple[Matches, Ranks]],
    score: RerankScore,
    temperature: float,
) -> None:
    """Reorder the candidates by their matching scores, and add recall in that order and the accuracy of the scores.

    Args:
        result: result, changed in place.
        scores: matching scores of its candidates, [I, k] and [T, k].
        ranks: matches, and ranks before re-ranking, by the prefix of the results; empty if the matches are unknown.
        score: score for the order.
        temperature: temperature of the contrastive logits.
    """
    near = result.near_texts, result.near_images
    weight = cosine_weight(score, temperature)
    result.non_finite_scores = sum(int((~direction_scores.isfinite()).sum()) for direction_scores in scores)
    # Zero times minus infinity is NaN: candidates with a cosine of minus infinity stay last for every weight.
    orders = [
        non_finite_last(direction_scores + weight * best.similarity)
        for best, direction_scores in zip(near, scores, strict=True)
    ]
    images, texts = (torch.arange(len(candidates.index))[:, None] for candidates in near)
    others = len(texts), len(images)
    for prefix, (matches, before) in ranks.items():
        match = matches.pairs(images, result.near_texts.index), matches.pairs(result.near_images.index, texts)
        new_ranks = (reranked_ranks(*row) for row in zip(orders, match, before, others, strict=True))
        result.recalls |= with_prefix(f"rerank_{prefix}", recalls(*new_ranks))
        result.hard_pairs = _hard_pairs(scores, match)
        if result.hard_pairs is not None:
            result.recalls[f"rerank_{prefix}pair_accuracy"] = result.hard_pairs.head
    result.near_texts, result.near_images = (
        candidates.reordered(*new) for candidates, *new in zip(near, scores, orders, strict=True)
    )


def _hard_pairs(scores: Sequence[Tensor], matches: Sequence[Tensor]) -> HardPairs | None:
    """Compare the best match of each row with its best wrong candidate, both by contrast; a tie of scores counts half.

    Args:
        scores: matching scores of the candidates in the order by contrast, [I, k] and [T, k].
        matches: which candidates are matches, boolean [I, k] and [T, k].

    Returns:
        None if no row has both among its candidates.
    """
    count = 0
    by_contrast = 0.0
    by_head = 0.0
    for score, match in zip(scores, matches, strict=True):
        both = match.any(1) & ~match.all(1)
        score = score[both]
        first_match = match[both].long().argmax(1, keepdim=True)  # the first of equal values
        first_wrong = (~match[both]).long().argmax(1, keepdim=True)
        margin = score.gather(1, first_match) - score.gather(1, first_wrong)
        count += len(score)
        by_contrast += float((first_match < first_wrong).sum())
        by_head += float((margin > 0).sum() + (margin == 0).sum() / 2)
    return HardPairs(count, 100 * by_contrast / count, 100 * by_head / count) if count else None
