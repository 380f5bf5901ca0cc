"""Caption scores equal those of the COCO evaluation, from raw captions."""

import pytest

from vlightning.metrics.captions import bleu, caption_scores, cider_d, ptb_tokens, rouge_l

# (candidate, references) of seven images: among them an empty candidate, candidates of one and two words, one that
# repeats itself, one that equals all of its references.
CORPUS = [
    (
        "A man riding a wave on top of a surfboard.",
        ["A man rides a surfboard on a large wave.", "A surfer riding a wave, in the ocean.", "Man surfing"],
    ),
    (
        "Two dogs play with a ball in the grass",
        [
            "Two dogs are playing with a red ball.",
            "Dogs don't share the ball in the grass!",
            "Two dogs play with a ball in the grass",
            "The dogs' ball (it's red)",
        ],
    ),
    ("", ["A plate of food on a table.", "A white plate topped with food"]),
    ("a cat", ["A cat sleeps on a black-and-white couch.", "a cat"]),
    (
        "A dog a dog a dog a dog sits on a bench",
        ["A dog sits on a bench.", "The brown dog is sitting; it looks happy", "A dog on a bench"],
    ),
    ("A red bus is parked on the street at 10:30 a.m.", ["A red bus is parked on the street at 10:30 a.m."] * 2),
    ("zebra", ["Three giraffes stand near a tall tree in a field of dry grass under the sky"]),
]
NAMES = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "cider_d")
# Computed once with pycocoevalcap 1.2 (Java 21): its PTBTokenizer over the raw captions, then Bleu(4), Rouge and Cider,
# times 100; of the whole corpus, and of its second image alone.
WHOLE = (
    56.06272084491095,
    53.10994966861945,
    49.60880669629502,
    46.92421846914367,
    60.580874437125956,
    286.30006892679336,
)
SECOND = (99.99999997777782, 99.99999997708338, 99.99999997625665, 99.99999997524806, 100.0, 0.0)


def scores(corpus):
    return caption_scores([candidate for candidate, _ in corpus], [references for _, references in corpus])


def test_scores_are_those_of_pycocoevalcap():
    assert scores(CORPUS) == pytest.approx(dict(zip(NAMES, WHOLE, strict=True)), rel=0, abs=1e-9)


def test_the_order_of_images_does_not_matter():
    assert scores(CORPUS[::-1]) == pytest.approx(dict(zip(NAMES, WHOLE, strict=True)), rel=0, abs=1e-9)


def test_a_single_image_has_cider_zero_with_a_warning():
    with pytest.warns(UserWarning, match="CIDEr-D of a single image is 0"):
        found = scores(CORPUS[1:2])
    assert found == pytest.approx(dict(zip(NAMES, SECOND, strict=True)), rel=0, abs=1e-9)


# What the Java tokenizer of pycocoevalcap 1.2 made of each line, less the marks that the COCO evaluation leaves out.
SPLIT = {
    "A man, riding a black-and-white horse.": "a man riding a black-and-white horse",
    "Two dogs don't run; they're \"asleep\" (on it)!": "two dogs do n't run they 're asleep -lrb- on it -rrb-",
    "It's the dog's ball -- isn't it?": "it 's the dog 's ball is n't it",
    "I cannot see 3.5 or 1,000 of 10:30 a.m. trains...": "i can not see 3.5 or 1,000 of 10:30 a.m. trains",
    "A t-shirt costs $5.99 & 50% off #sale @home": "a t-shirt costs $ 5.99 & 50 % off #sale @home",
    "Mr. Smith's cat can't jump. It won't.": "mr. smith 's cat ca n't jump it wo n't",
    "gonna wanna gimme lemme": "gon na wan na gim me lem me",
    "half/half 1/2 w/ cheese": "half/half 1/2 w / cheese",
    "the boys' bikes 'quoted' words' end": "the boys bikes quoted words end",
    "A [bracket] {brace} <tag>": "a -lsb- bracket -rsb- -lcb- brace -rcb- <tag>",
    "U.S. flag. No. 7 st. corner": "u.s. flag no. 7 st. corner",
    "Café naïve \u201ccurly\u201d \u2018single\u2019": "café naïve curly single",
    "it\u2019s \u2013 dash \u2014 em\u2026": "it 's dash em",
    "    spaces   everywhere   ": "spaces everywhere",
    "he'd she'll we've I'm you're": "he 'd she 'll we 've i 'm you 're",
    "in the '90s": "in the '90s",
    "man.Woman no space,after 5th 1980s": "man.woman no space after 5th 1980s",
    "A+B=C * ~ ^ | _ under_score": "a+b = c * ~ ^ | _ under_score",
    "wait...what?! yes!!": "wait what ?! yes !!",
    "dr. st. jr. mt.": "dr. st. jr. mt.",
    "A dog. A cat. ": "a dog a cat",
    "x-ray on-going re-use co-op": "x-ray on-going re-use co-op",
    "5'10\" tall 20-year-old": "5 10 tall 20-year-old",
    "'tis 'twas o'clock": "'t is 't was o'clock",
    "A plate of food .": "a plate of food",
    "Plan B. of Dr. J. Who on 5th Ave. in Sept.": "plan b. of dr. j. who on 5th ave. in sept.",
    "a mmap'ed file": "a mmap ed file",
    "": "",
}


@pytest.mark.parametrize("caption", SPLIT)
def test_captions_are_split_as_the_java_tokenizer_splits_them(caption):
    assert " ".join(ptb_tokens(caption)) == SPLIT[caption]


def test_equal_captions_have_the_best_scores():
    texts = [["a", "b", "c", "d", "e"], ["f", "g", "h", "i"]]
    references = [[text] for text in texts]
    assert bleu(texts, references) == pytest.approx([1.0] * 4)
    assert rouge_l(texts, references) == pytest.approx(1.0)
    assert cider_d(texts, references) == pytest.approx(10.0)


def test_captions_without_a_common_word_score_zero():
    candidates, references = [["a", "b"], ["c"]], [[["d", "e"]], [["f"]]]
    assert bleu(candidates, references) == pytest.approx([0.0] * 4, abs=1e-6)
    assert rouge_l(candidates, references) == 0
    assert cider_d(candidates, references) == 0


def test_missing_references_are_refused():
    with pytest.raises(ValueError, match="1 of them of images without a reference"):
        caption_scores(["a", "b"], [["a"], []])
    with pytest.raises(ValueError, match="got 0 captions"):
        caption_scores([], [])
