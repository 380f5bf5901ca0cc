"""Tables of the benchmark of new towers: golden lines, the page beside its results, and what is drawn and split."""

import io
import itertools

import pytest
from new_tower import PAGE, RESULTS, page, parts, read, shapes, tables
from PIL import Image


def line(seed, r1, queries="new", index="old", arm="text, MiniLM", dimension=512, number_format="float32"):
    common = {"collection": "emoji", "arm": arm, "seed": seed, "commit": "abc", "recall": {"r1": r1}}
    return common | {"queries": queries, "index": index, "dimension": dimension, "format": number_format}


def test_shares_are_those_of_the_old_queries_of_the_same_seed():
    old = [line(0, 20.0, queries="old"), line(1, 40.0, queries="old")]
    small = [line(seed, 10.0, dimension=64) for seed in (0, 1)] + [line(0, 17.0, number_format="int8")]
    drawn = tables([*old, line(0, 18.0), line(1, 38.0), *small])
    # 18 / 20 and 38 / 40: 90 and 95 percent, with a standard deviation of 5 / sqrt(2).
    assert "| emoji: text, MiniLM | 30.00 ± 14.14 | 28.00 ± 14.14 | 92.50 ± 3.54 |  |  | 0, 1 |" in drawn
    assert "| emoji: text, MiniLM | 28.00 ± 14.14 |  |  | 10.00 ± 0.00 | 17.00 ± 0.00 |" in drawn
    assert "(commit `abc`)" in drawn


def test_an_image_tower_is_compared_in_a_mixed_index():
    arm = "image, a quarter of the parameters"
    lines = [line(0, 20.0, "old", arm=arm), line(0, 19.0, index="mixed", arm=arm), line(0, 5.0, index="new", arm=arm)]
    drawn = tables(lines)
    assert f"| emoji: {arm} | 20.00 ± 0.00 |  |  | 19.00 ± 0.00 | 95.00 ± 0.00 | 0 |" in drawn
    assert f"| emoji: {arm} | 5.00 ± 0.00 |" in drawn


def test_the_page_has_the_tables_of_its_results():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, read(RESULTS)) == text


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_shares_of_rows_are_spread_and_complete(share):
    taken, left = parts(100, share)
    assert len(taken) == 100 * share
    assert sorted(taken + left) == list(range(100))
    assert max(after - before for before, after in itertools.pairwise(taken)) == 2


def test_drawn_scenes_have_captions_of_the_same_content_in_both_languages():
    rows = shapes("test", 20)
    assert Image.open(io.BytesIO(rows["image"][0]["bytes"])).size == (96, 96)
    english = "a large blue square below a small green triangle"
    assert rows["german"][rows["caption"].index(english)] == "groß blau Quadrat unter klein grün Dreieck"
