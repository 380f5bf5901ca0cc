"""Accuracy of visual question answering as the VQA challenge has it (Antol et al., arXiv 1505.00468; visualqa.org)."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Literal

AnswerType = Literal["yes/no", "number", "other"]
ANSWER_TYPES: tuple[AnswerType, ...] = ("yes/no", "number", "other")

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # the challenge keeps apostrophes and colons, which times contain
_DIGIT_COMMA = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = {"none": "0"} | {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
}
# The contractions that the challenge completes; each is recognized when it lacks one of its apostrophes. Those of "I"
# are not among them, because its table has them in upper case.
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_COMPLETED = {
    word[:position] + word[position + 1 :]: word
    for word in _CONTRACTIONS.split()
    for position, letter in enumerate(word)
    if letter == "'"
} | {"somebody'd": "somebodyd"}  # as in the challenge's table


def normalized_answer(answer: str) -> str:
    """Normalize an answer as the challenge does before answers are compared.

    Punctuation is deleted if it touches a space anywhere in the answer, or if the answer has a comma between digits,
    and else becomes a space; periods stay before digits only. Then, word by word: lower case, digits for the numbers to
    ten, no articles, apostrophes in contractions.
    """
    return _normalized(" ".join(answer.split()))


@cache
def _normalized(text: str) -> str:
    cleaned = text
    joins = _DIGIT_COMMA.search(text) is not None
    for mark in _PUNCTUATION:
        touches = f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if touches or joins else " ")
    words = _PERIOD.sub("", cleaned).lower().split()
    words = [_NUMBERS.get(word, word) for word in words]
    return " ".join(_COMPLETED.get(word, word) for word in words if word not in _ARTICLES)


def answer_accuracy(answer: str, human_answers: Sequence[str]) -> float:
    """Compute the accuracy of an answer: the mean over the people asked of min(n/3, 1), n others who gave it.

    Args:
        answer: the predicted answer, raw text.
        human_answers: the answers that people gave, raw text; ten in VQA v2.

    Returns:
        Accuracy from 0 to 1. With a single given answer, as tables of one's own have it, whether the two are equal.

    Raises:
        ValueError: If nobody was asked.
    """
    if not human_answers:
        raise ValueError("Expected at least one given answer, got none: leave the question out.")
    predicted = normalized_answer(answer)
    people = len(human_answers)
    agree = sum(normalized_answer(one) == predicted for one in human_answers)
    if people == 1:
        return float(agree)
    # Those who agree have one fellow less among the others.
    return (agree * min((agree - 1) / 3, 1) + (people - agree) * min(agree / 3, 1)) / people if agree else 0.0


def answer_type(human_answers: Sequence[str]) -> AnswerType:
    """Return the type of a question by the most frequent of its answers; the first of several wins."""
    (most, _), *_ = Counter(map(normalized_answer, human_answers)).most_common(1)
    if most in ("yes", "no"):
        return "yes/no"
    return "number" if re.fullmatch(r"\d+(\.\d+)?", most) else "other"
