"""Accuracy of VQA: each rule of the answers' normalization by hand, and the mean over the people who were asked."""

from itertools import combinations

import pytest

from vlightning.metrics.vqa import answer_accuracy, answer_type, normalized_answer

RULES = {
    "lower case": [("Yes", "yes"), ("New York", "new york")],
    "articles": [
        ("a dog", "dog"),
        ("an apple on the table", "apple on table"),
        ("The The", ""),
        ("theater", "theater"),
    ],
    "number words": [("zero", "0"), ("none", "0"), ("two dogs", "2 dogs"), ("Ten", "10"), ("eleven", "eleven")],
    "contractions": [
        *(("dont", "don't"), ("cant swim", "can't swim"), ("couldnt've", "couldn't've"), ("couldn'tve", "couldn't've")),
        *(("whats", "what's"), ("oclock", "o'clock"), ("yall'd've", "y'all'd've"), ("twas", "'twas")),
        *(("don't", "don't"), ("im", "im"), ("well", "well"), ("shed", "shed"), ("dog's", "dog's")),
    ],
    "punctuation": [
        *(("red/white", "red white"), ("red, white", "red white"), ("black-and-white", "black and white")),
        *(("what?", "what"), ("t-shirt -", "tshirt"), ("[yes]", "yes"), ("(no)", "no"), ("10:30", "10:30")),
        *(("stop!", "stop"), ("#1", "#1"), ("a_b", "b"), ('"hi"', "hi"), ("50%", "50%")),
    ],
    "comma between digits": [("1,000", "1000"), ("100,978", "100978"), ("1,000 t-shirts", "1000 tshirts")],
    "periods": [("yes.", "yes"), ("3.5", "3.5"), ("u.s.", "us"), ("no . 1", "no 1"), ("3.", "3")],
    "spaces": [(" on\tthe\n  table ", "on table"), ("", "")],
}


@pytest.mark.parametrize(
    ("raw", "expected"), [pair for pairs in RULES.values() for pair in pairs], ids=lambda text: repr(text)
)
def test_each_rule_of_the_normalization(raw, expected):
    assert normalized_answer(raw) == expected


def leave_one_out(answer, given):
    """The definition: without each person in turn, min(1, those of the others who agree / 3)."""
    shares = [
        min(1, sum(other == answer for place, other in enumerate(given) if place != left) / 3)
        for left in range(len(given))
    ]
    return sum(shares) / len(shares)


@pytest.mark.parametrize("agree", range(11))
def test_accuracy_is_the_mean_over_subsets_of_the_others(agree):
    given = ["cat"] * agree + ["dog"] * (10 - agree)
    assert answer_accuracy("cat", given) == pytest.approx(leave_one_out("cat", given))
    # As the challenge writes it: the mean over the subsets of nine people.
    subsets = [min(1, sum(one == "cat" for one in nine) / 3) for nine in combinations(given, 9)]
    assert answer_accuracy("cat", given) == pytest.approx(sum(subsets) / 10)


def test_known_values():
    assert [round(answer_accuracy("cat", ["cat"] * n + ["dog"] * (10 - n)), 4) for n in range(5)] == [
        0,
        0.3,
        0.6,
        0.9,
        1,
    ]


def test_both_sides_are_normalized():
    assert answer_accuracy("A Dog.", ["dog"] * 10) == 1
    assert answer_accuracy("2", ["two"] * 5 + ["The two"] * 5) == 1
    assert answer_accuracy("two dogs", ["dogs"] * 10) == 0


@pytest.mark.parametrize("given", [["cat", "cat"], ["cat", "cat", "dog"], ["dog", "cat", "dog", "cat"]])
def test_few_people_are_left_out_too(given):
    assert answer_accuracy("cat", given) == pytest.approx(leave_one_out("cat", given))


def test_a_single_answer_is_met_or_not():
    assert (answer_accuracy("red", ["Red"]), answer_accuracy("red", ["blue"])) == (1, 0)
    with pytest.raises(ValueError, match="Expected at least one given answer"):
        answer_accuracy("red", [])


def test_types_of_questions():
    assert answer_type(["Yes"] * 4 + ["no"] * 6) == "yes/no"
    assert answer_type(["two"] * 5 + ["3"] * 3) == "number"
    assert answer_type(["1,000"]) == "number"
    assert answer_type(["red"] * 5 + ["no"] * 5) == "other"
