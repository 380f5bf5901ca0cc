from math import comb
from statistics import mean, median

import pytest
import torch

from vlightning.metrics import retrieval
from vlightning.metrics.retrieval import (
    Matches,
    average_median_ranks,
    chance_recalls,
    nearest_candidates,
    recalls,
    reranked_ranks,
    retrieval_ranks,
)


def _ids(images, seed):
    """Images with any number of captions, of which some are equal, in any order."""
    torch.manual_seed(seed)
    image_id = torch.randperm(1000)[:images]
    captions = torch.randint(0 if images > 1 else 1, 5, (images,))
    captions[0] = 3
    text_image_id = image_id.repeat_interleave(captions)
    text_image_id = text_image_id[torch.randperm(len(text_image_id))]
    return image_id, text_image_id, torch.randint(0, max(2, images // 2), (len(text_image_id),))


def _match(image_id, text_image_id, text_id, i, t):
    if image_id[i] == text_image_id[t]:
        return True
    texts = range(len(text_image_id))
    return text_id is not None and any(text_image_id[u] == image_id[i] and text_id[u] == text_id[t] for u in texts)


def _brute_force(image, text, ids, k):
    """Recall by sorting each row of the similarity matrix in Python."""
    images, texts = len(image), len(text)
    scores = (image @ text.T).tolist()
    to_text = sum(
        any(_match(*ids, i, t) for t in sorted(range(texts), key=lambda t, i=i: -scores[i][t])[:k])
        for i in range(images)
    )
    to_image = sum(
        any(_match(*ids, i, t) for i in sorted(range(images), key=lambda i, t=t: -scores[i][t])[:k])
        for t in range(texts)
    )
    return 100 * to_text / images, 100 * to_image / texts


@pytest.mark.parametrize("equal_texts", [False, True])
@pytest.mark.parametrize(("images", "seed"), [(1, 0), (7, 3), (40, 2)])
def test_chance_is_the_probability_of_a_match_among_k_drawn_candidates(monkeypatch, images, seed, equal_texts):
    monkeypatch.setattr(retrieval, "_CHUNK", 7)
    image_id, text_image_id, text_id = _ids(images, seed)
    ids = image_id, text_image_id, text_id if equal_texts else None
    found, texts = chance_recalls(Matches(*ids)), len(text_image_id)
    match = [[_match(*ids, i, t) for t in range(texts)] for i in range(images)]
    for direction, rows in (("image_to_text", match), ("text_to_image", list(zip(*match, strict=True)))):
        for k in (1, 5, 10):
            drawn = min(k, len(rows[0]))
            missed = [comb(len(row) - sum(row), drawn) / comb(len(row), drawn) for row in rows]
            assert found[f"{direction}_r{k}"] == pytest.approx(100 - 100 * mean(missed))
    assert found["recall_mean"] == pytest.approx(mean(v for name, v in found.items() if name != "recall_mean"))


@pytest.mark.parametrize("equal_texts", [False, True])
@pytest.mark.parametrize(("images", "seed"), [(1, 0), (13, 1), (40, 2)])
def test_recall_equals_brute_force_for_any_number_of_captions(monkeypatch, images, seed, equal_texts):
    monkeypatch.setattr(retrieval, "_CHUNK", 7)
    image_id, text_image_id, text_id = _ids(images, seed)
    ids = image_id, text_image_id, text_id if equal_texts else None
    image, text = torch.randn(images, 8), torch.randn(len(text_image_id), 8)
    result = recalls(*retrieval_ranks(image, text, Matches(*ids)))
    for k in (1, 5, 10):
        to_text, to_image = _brute_force(image, text, ids, k)
        assert result[f"image_to_text_r{k}"] == pytest.approx(to_text)
        assert result[f"text_to_image_r{k}"] == pytest.approx(to_image)
    assert result["recall_mean"] == pytest.approx(sum(v for n, v in result.items() if n != "recall_mean") / 6)


@pytest.mark.parametrize("equal_texts", [False, True])
def test_matches_are_the_same_by_block_and_by_pair(equal_texts):
    image_id, text_image_id, text_id = _ids(17, 3)
    ids = image_id, text_image_id, text_id if equal_texts else None
    expected = torch.tensor([[_match(*ids, i, t) for t in range(len(text_image_id))] for i in range(17)])
    matches = Matches(*ids)
    images, texts = torch.arange(17)[:, None], torch.arange(len(text_image_id))
    assert torch.equal(matches.block(slice(3, 9)), expected[3:9])
    assert torch.equal(matches.pairs(images, texts), expected)
    assert expected.sum() >= len(text_image_id)


def test_a_collapsed_model_has_recall_zero():
    ids = torch.arange(20)
    assert recalls(*retrieval_ranks(torch.ones(20, 4), torch.ones(20, 4), Matches(ids, ids)))["recall_mean"] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("candidates", [3, 20])
def test_a_model_with_non_finite_features_has_recall_zero_and_last_ranks(value, candidates):
    ids, good = torch.arange(candidates), torch.eye(candidates)
    dead, matches = torch.full_like(good, value), Matches(ids, ids)
    for features in ((dead, dead), (good, dead), (dead, good)):
        assert set(recalls(*retrieval_ranks(*features, matches)).values()) == {0}
        assert set(average_median_ranks(*features, matches).values()) == {candidates + 1}
        near = nearest_candidates(*features, 2)
        assert all((side.similarity == -torch.inf).all() for side in near)


@pytest.mark.parametrize("chunk", [7, 1024])
def test_some_non_finite_features_rank_after_all_others_and_change_nothing_else(monkeypatch, chunk):
    monkeypatch.setattr(retrieval, "_CHUNK", chunk)
    image_id, text_image_id, _ = _ids(40, 2)
    matches = Matches(image_id, text_image_id)
    image, text = torch.randn(40, 8), torch.randn(len(text_image_id), 8)
    images, texts = (torch.rand(len(side)) < 0.2 for side in (image, text))
    image_ranks, text_ranks = retrieval_ranks(
        image.masked_fill(images[:, None], torch.nan), text.masked_fill(texts[:, None], torch.nan), matches
    )
    # Finite rows rank as without the non-finite rows, which have no match.
    kept = Matches(image_id[~images], text_image_id[~texts])
    expected = retrieval_ranks(image[~images], text[~texts], kept)
    found = torch.isin(image_id, kept.text_image_id)
    assert torch.equal(image_ranks[~images & found], expected[0][found[~images]])
    assert (image_ranks[images | ~found] == len(text)).all()
    found = torch.isin(text_image_id, kept.image_id)
    assert torch.equal(text_ranks[~texts & found], expected[1][found[~texts]])
    assert (text_ranks[texts | ~found] == len(image)).all()
    assert (images.any(), texts.any(), found.any()) == (True, True, True)


@pytest.mark.parametrize("k", [1, 4, 100])
def test_candidates_are_the_nearest_in_both_directions(monkeypatch, k):
    monkeypatch.setattr(retrieval, "_CHUNK", 5)
    torch.manual_seed(0)
    image, text = torch.randn(12, 4), torch.randn(23, 4)
    near_texts, near_images = nearest_candidates(image, text, k)
    scores = image @ text.T
    for near, rows in ((near_texts, scores), (near_images, scores.T)):
        expected = rows.topk(min(k, rows.shape[1]), 1)
        assert torch.equal(near.index, expected.indices)
        torch.testing.assert_close(near.similarity, expected.values)


def test_a_match_outside_the_candidates_keeps_its_rank():
    order_by = torch.tensor([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1], [0.4, 0.4, 0.1]])
    match = torch.tensor([[True, False, False], [False, False, False], [True, False, False]])
    assert reranked_ranks(order_by, match, torch.tensor([0, 17, 0]), 20).tolist() == [2, 17, 1]


def test_a_match_with_a_non_finite_new_score_ranks_last():
    low = -torch.inf
    order_by = torch.tensor([[0.1, low, 0.5], [low, low, low], [low, 0.4, 0.1]])
    match = torch.tensor([[False, True, False], [True, True, False], [True, False, True]])
    assert reranked_ranks(order_by, match, torch.tensor([0, 0, 0]), 20).tolist() == [20, 20, 1]


def _median_ranks_by_loops(image, text, ids, fold):
    """The definition, one image and one caption at a time: the mean of the medians in both directions."""
    image_id, text_image_id, text_id = ids
    scores = (image @ text.T).tolist()
    captions = [[t for t, owner in enumerate(text_image_id) if owner == own] for own in image_id]
    images = [i for i in range(len(image)) if captions[i]]
    folds = [images[start : start + fold] for start in range(0, len(images), fold)]
    folds = [part for part in folds if len(part) == fold] or folds
    to_image, to_text = [], []
    for part in folds:
        for k in range(min(len(captions[i]) for i in images)):
            texts = [captions[i][k] for i in part]

            def right(i, t, texts=texts):
                own = [u for u in texts if text_image_id[u] == image_id[i]]
                return t in own or (text_id is not None and any(text_id[u] == text_id[t] for u in own))

            def rank(pairs):
                best = max(scores[i][t] for i, t in pairs if right(i, t))
                return 1 + sum(scores[i][t] >= best for i, t in pairs if not right(i, t))

            to_text.append(median(rank([(i, t) for t in texts]) for i in part))
            to_image.append(median(rank([(i, t) for i in part]) for t in texts))
    return {"median_rank_text_to_image": mean(to_image), "median_rank_image_to_text": mean(to_text)}


def _shuffled_captions(counts, seed=0):
    """Images with these numbers of captions in any order, of which some are equal; no two images are alike."""
    generator = torch.Generator().manual_seed(seed)
    image_id = torch.randperm(1000, generator=generator)[: len(counts)]
    text_image_id = image_id.repeat_interleave(torch.tensor(counts))
    text_image_id = text_image_id[torch.randperm(len(text_image_id), generator=generator)]
    return image_id, text_image_id, torch.randint(0, len(counts), (len(text_image_id),), generator=generator)


@pytest.mark.parametrize("equal_texts", [False, True])
@pytest.mark.parametrize("whole", [False, True])  # scores of whole numbers tie
@pytest.mark.parametrize(
    ("counts", "fold"),
    [
        ([2] * 23, 7),  # three folds, and two images too many
        ([2] * 24, 8),
        ([3, 2, 5, 4] * 5, 6),
        ([3, 0, 2, 0, 4, 3, 2, 2, 0], 3),  # images without captions are left out
        ([1, 3, 2, 2, 2], 1000),  # the only fold is incomplete
        ([1], 1),
    ],
)
def test_median_ranks_equal_plain_loops(monkeypatch, counts, fold, whole, equal_texts):
    monkeypatch.setattr(retrieval, "_CHUNK", 5)
    image_id, text_image_id, text_id = _shuffled_captions(counts)
    ids = image_id, text_image_id, text_id if equal_texts else None
    generator = torch.Generator().manual_seed(1)
    vectors = {int(number): torch.randn(4, generator=generator) for number in image_id}
    image = torch.stack([vectors[int(number)] for number in image_id])
    text = torch.stack([vectors[int(number)] for number in text_image_id])
    image, text = (part + torch.randn(part.shape, generator=generator) for part in (image, text))
    if whole:
        image, text = image.round(), text.round()
    found = average_median_ranks(image, text, Matches(*ids), fold)
    assert found == pytest.approx(_median_ranks_by_loops(image, text, ids, fold))
    if len(counts) == 24 and not equal_texts:
        assert len(set(found.values())) == 2  # the directions differ


def test_median_ranks_of_perfect_and_random_models():
    """Two folds of a thousand images with two captions each."""
    ids = torch.arange(2000)
    matches = Matches(ids, ids.repeat_interleave(2))
    image = torch.nn.functional.normalize(torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    names = {"median_rank_text_to_image", "median_rank_image_to_text"}
    assert average_median_ranks(image, image.repeat_interleave(2, 0), matches) == dict.fromkeys(names, 1.0)
    text = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    assert average_median_ranks(image, text, matches) == dict.fromkeys(names, pytest.approx(500.5, abs=40))
    # Equal features tie, and a match ranks after all ties.
    constant = torch.ones(2000, 16), torch.ones(4000, 16)
    assert average_median_ranks(*constant, matches) == dict.fromkeys(names, 1000.0)


def test_an_even_number_of_ranks_has_its_median_in_the_middle():
    # Two images: the first is found first, the second ties with it.
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    ids = torch.arange(2)
    found = average_median_ranks(scores, torch.eye(2), Matches(ids, ids))
    assert found == {"median_rank_text_to_image": 1.5, "median_rank_image_to_text": 1.5}


def test_median_ranks_without_any_caption_are_refused():
    with pytest.raises(ValueError, match="got none for any of 3 images"):
        average_median_ranks(torch.eye(3), torch.eye(3), Matches(torch.arange(3), torch.arange(3) + 7))


@pytest.mark.parametrize("scores", [1, 64, 100, 1000])
def test_blocks_of_any_number_of_similarities_give_the_same_results(monkeypatch, scores):
    image_id, text_image_id, text_id = _ids(40, 2)
    matches = Matches(image_id, text_image_id, text_id)
    image, text = torch.randn(40, 8).double(), torch.randn(len(text_image_id), 8).double()

    def results():
        near = retrieval.nearest_candidates(image, text, 5)
        return *retrieval_ranks(image, text, matches), near[0].index, near[1].index, chance_recalls(matches)

    whole = results()
    monkeypatch.setattr(retrieval, "_SCORES", scores)
    for one, other in zip(whole[:-1], results()[:-1], strict=True):
        assert torch.equal(one, other)
    assert results()[-1] == pytest.approx(whole[-1])
