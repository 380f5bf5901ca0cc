"""Scores of generated captions against references: BLEU, ROUGE-L and CIDEr-D as the COCO evaluation defines them.

Implemented here, because pycocoevalcap needs Java to split words, and aac-metrics needs transformers below 5 and numpy
below 2.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from lightning.pytorch.utilities import rank_zero_warn

Tokens = list[str]
_ORDERS = (1, 2, 3, 4)  # lengths of the n-grams
_ROUGE_BETA = 1.2
_CIDER_SIGMA = 6.0

# Tokens that the COCO evaluation removes. Its list also has the Penn Treebank's words for brackets, but in upper case,
# which lower-cased tokens never match: brackets are kept, as these words.
_LEFT_OUT = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_TYPESET = str.maketrans(  # quotes, dashes and an ellipsis as typesetters have them
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": " -- ", "\u2014": " -- ", "\u2026": "..."}
)
_JOINED = re.compile(r"\b(can)(not)\b|\b(gon|wan)(na)\b|\b(got)(ta)\b|\b(gim|lem)(me)\b|(?<!\w)('t)(is|was)\b")
_NOT = re.compile(r"(?<=\w)(n't)\b")
_SHORTENED = re.compile(r"(?<=\w)('(?:s|m|d|re|ve|ll))\b")
_TOKEN = re.compile(
    r"""
    # Abbreviations keep their stop, and so do a.m., u.s. and initials.
    (?:mr|mrs|ms|dr|prof|rev|jr|sr|st|mt|ave|blvd|rd|sq|ft|inc|ltd|co|corp|dept|etc|vs|est|gov|gen|sgt|capt|lt|col
        |jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mon|tues?|wed|thu|thurs|fri|no(?=\.\ *\d))\.(?!\w)
    | (?:[^\W\d_]\.)+(?!\w)
    | n't\b | '(?:s|m|d|re|ve|ll|t)\b | '\d\ds\b
    | \d+(?:[.,:]\d+)+                              # 3.5, 1,000, 10:30
    | [\#@]?\w+(?:[-/.+]\w+|(?<=\b[od])'\w+)*        # also black-and-white, half/half, o'clock
    | \.{3} | -{2,} | [?!]{2,} | <\w+>
    | [^\w\s]
    """,
    re.VERBOSE,
)


def ptb_tokens(caption: str) -> Tokens:
    """Split a caption as the Penn Treebank tokenizer of the COCO evaluation does: lower case, without punctuation.

    The two agree on what captions are made of (words, numbers, contractions, abbreviations, brackets, quotes), not on
    everything that may be typed, such as addresses: they differed in 1.3% of 3,000 lines from licences and manuals.
    """
    text = caption.lower().translate(_TYPESET)
    text = _JOINED.sub(lambda match: " ".join(filter(None, match.groups())), text)
    text = _SHORTENED.sub(r" \1", _NOT.sub(r" \1", text)).replace('"', " ")
    return [_BRACKETS.get(token, token) for token in _TOKEN.findall(text) if token not in _LEFT_OUT]


def bleu(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> list[float]:
    """BLEU-1 to BLEU-4 of a corpus, whose brevity penalty compares with the reference that is closest in length.

    Args:
        candidates: one caption of each image.
        references: at least one caption of each image.

    Returns:
        Four numbers from 0 to 1.
    """
    matched = dict.fromkeys(_ORDERS, 0)
    possible = dict.fromkeys(_ORDERS, 0)
    length = reference_length = 0
    for candidate, texts in zip(candidates, references, strict=True):
        length += len(candidate)
        reference_length += min((abs(len(text) - len(candidate)), len(text)) for text in texts)[1]
        for n in _ORDERS:
            most: Counter[tuple[str, ...]] = Counter()
            for text in texts:
                most |= _ngrams(text, n)
            matched[n] += (_ngrams(candidate, n) & most).total()
            possible[n] += max(len(candidate) - n + 1, 0)
    # Small constants of the COCO evaluation against division by 0.
    ratio = (length + 1e-15) / (reference_length + 1e-9)
    penalty = min(1.0, math.exp(1 - 1 / ratio))
    scores = []
    product = 1.0
    for n in _ORDERS:
        product *= (matched[n] + 1e-15) / (possible[n] + 1e-9)
        scores.append(penalty * product ** (1 / n))
    return scores


def rouge_l(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """ROUGE-L: F score, beta 1.2, of the largest precision and the largest recall over an image's references.

    Arguments are those of `bleu`.

    Returns:
        The mean over the images, from 0 to 1.
    """
    return _mean([_rouge_l(candidate, texts) for candidate, texts in zip(candidates, references, strict=True)])


def _rouge_l(candidate: Tokens, texts: Sequence[Tokens]) -> float:
    common = [_common_subsequence(candidate, text) for text in texts]
    precision = max(common) / max(len(candidate), 1)
    recall = max(length / max(len(text), 1) for length, text in zip(common, texts, strict=True))
    if not precision or not recall:
        return 0.0
    return (1 + _ROUGE_BETA**2) * precision * recall / (recall + _ROUGE_BETA**2 * precision)


def _common_subsequence(first: Tokens, second: Tokens) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0  # the entry above and to the left
        for column, other in enumerate(second, start=1):
            before, row[column] = row[column], before + 1 if word == other else max(row[column], row[column - 1])
    return row[-1]


def cider_d(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """CIDEr-D: similarity of n-gram counts, weighted by how rare an n-gram is among the references of this corpus.

    Arguments are those of `bleu`. The references of one image alone have no rare n-grams: its score is 0.

    Returns:
        The mean over the images and over n from 1 to 4, times 10 (captions that people wrote are near 1).
    """
    images_with: Counter[tuple[str, ...]] = Counter()
    for texts in references:
        images_with.update(set(chain.from_iterable(_ngrams(text, n) for text in texts for n in _ORDERS)))
    logarithm = math.log(max(len(references), 1))

    def weighted(text: Tokens, n: int) -> dict[tuple[str, ...], float]:
        return {
            ngram: count * (logarithm - math.log(max(images_with[ngram], 1)))
            for ngram, count in _ngrams(text, n).items()
        }

    scores = []
    for candidate, texts in zip(candidates, references, strict=True):
        vectors = {n: weighted(candidate, n) for n in _ORDERS}
        similarities = []
        for text in texts:
            # Lengths are counted in pairs of words, as in the COCO evaluation.
            difference = max(len(candidate) - 1, 0) - max(len(text) - 1, 0)
            penalty = math.exp(-(difference**2) / (2 * _CIDER_SIGMA**2))
            similarities += [penalty * _clipped_cosine(vectors[n], weighted(text, n)) for n in _ORDERS]
        scores.append(_mean(similarities))
    return 10 * _mean(scores)


def _clipped_cosine(candidate: dict[tuple[str, ...], float], reference: dict[tuple[str, ...], float]) -> float:
    norms = math.hypot(*candidate.values()) * math.hypot(*reference.values())
    shared = candidate.keys() & reference.keys()
    product = sum(min(candidate[ngram], reference[ngram]) * reference[ngram] for ngram in shared)
    return product / norms if norms else 0.0


def caption_scores(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """All scores of raw captions, times 100.

    Args:
        candidates: one caption of each image.
        references: at least one caption of each image.

    Returns:
        `bleu_1` to `bleu_4`, `rouge_l` and `cider_d`; the last may exceed 100.

    Raises:
        ValueError: If there is no image, or an image has no reference.
    """
    if not candidates or not all(references):
        raise ValueError(
            "Expected captions of images that each have a reference, got "
            f"{len(candidates)} captions, {sum(not texts for texts in references)} of them of images without a "
            "reference: evaluate images that have captions."
        )
    if len(candidates) == 1:
        rank_zero_warn("CIDEr-D of a single image is 0, since no n-gram is rare among its own references.")
    split = [ptb_tokens(caption) for caption in candidates]
    references_split = [[ptb_tokens(caption) for caption in texts] for texts in references]
    scores = {f"bleu_{n}": score for n, score in zip(_ORDERS, bleu(split, references_split), strict=True)}
    scores |= {"rouge_l": rouge_l(split, references_split), "cider_d": cider_d(split, references_split)}
    return {name: 100 * score for name, score in scores.items()}


def _ngrams(text: Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[start : start + n]) for start in range(len(text) - n + 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
