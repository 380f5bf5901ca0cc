import pytest
import torch

from vlightning.lightning_modules import retrieval
from vlightning.lightning_modules.retrieval import (
    Matches,
    nearest_candidates,
    recalls,
    reranked_ranks,
    retrieval_ranks,
)


def _ids(images, seed):
    """Pictures with any number of captions, of which some are equal, in any order."""
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


def test_a_collapsed_model_gets_no_recall():
    ids = torch.arange(20)
    assert recalls(*retrieval_ranks(torch.ones(20, 4), torch.ones(20, 4), Matches(ids, ids)))["recall_mean"] == 0


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
    assert reranked_ranks(order_by, match, torch.tensor([0, 17, 0])).tolist() == [2, 17, 1]
