import pytest
import torch

from support.distributed import run_distributed
from vlightning.callbacks import rank
from vlightning.lightning_modules import retrieval
from vlightning.lightning_modules.retrieval import RetrievalRecall


def _brute_force(image, text, image_id, text_image_id, text_id, k):
    """Recall by sorting each row of the similarity matrix in Python."""
    images, texts = len(image), len(text)

    def match(i, t):
        if image_id[i] == text_image_id[t]:
            return True
        return text_id is not None and any(
            text_image_id[u] == image_id[i] and text_id[u] == text_id[t] for u in range(texts)
        )

    scores = (image @ text.T).tolist()
    to_text = sum(
        any(match(i, t) for t in sorted(range(texts), key=lambda t, i=i: -scores[i][t])[:k]) for i in range(images)
    )
    to_image = sum(
        any(match(i, t) for i in sorted(range(images), key=lambda i, t=t: -scores[i][t])[:k]) for t in range(texts)
    )
    return 100 * to_text / images, 100 * to_image / texts


@pytest.mark.parametrize("equal_texts", [False, True])
@pytest.mark.parametrize(("images", "seed"), [(1, 0), (13, 1), (40, 2)])
def test_recall_equals_brute_force_for_any_number_of_captions(monkeypatch, images, seed, equal_texts):
    monkeypatch.setattr(retrieval, "_CHUNK", 7)
    torch.manual_seed(seed)
    image_id = torch.randperm(1000)[:images]
    captions = torch.randint(0 if images > 1 else 1, 5, (images,))
    captions[0] = 3
    text_image_id = image_id.repeat_interleave(captions)
    text_image_id = text_image_id[torch.randperm(len(text_image_id))]
    text_id = torch.randint(0, max(2, images // 2), (len(text_image_id),))
    image, text = torch.randn(images, 8), torch.randn(len(text_image_id), 8)

    recall = RetrievalRecall(equal_texts)
    for part in range(0, len(text), 5):  # texts arrive in batches of any size
        rows = slice(part // 5 * 4, part // 5 * 4 + 4) if part + 5 < len(text) else slice(part // 5 * 4, None)
        texts = slice(part, part + 5)
        recall.update(image[rows], text[texts], image_id[rows], text_image_id[texts], text_id[texts])
    result = recall.compute()
    for k in (1, 5, 10):
        to_text, to_image = _brute_force(image, text, image_id, text_image_id, text_id if equal_texts else None, k)
        assert result[f"image_to_text_r{k}"] == pytest.approx(to_text)
        assert result[f"text_to_image_r{k}"] == pytest.approx(to_image)
    assert result["recall_mean"] == pytest.approx(sum(v for n, v in result.items() if n != "recall_mean") / 6)


def test_a_collapsed_model_gets_no_recall():
    recall = RetrievalRecall()
    ids = torch.arange(20)
    recall.update(torch.ones(20, 4), torch.ones(20, 4), ids, ids, ids)
    assert recall.compute()["recall_mean"] == 0


def test_features_are_kept_in_main_memory_in_float32():
    recall = RetrievalRecall()
    recall.update(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4), *[torch.arange(2)] * 3)
    assert recall._image[0][0].dtype == torch.float32
    assert recall._image[0][0].device.type == "cpu"


def test_recall_of_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="no picture with a caption"):
        RetrievalRecall().compute()


def _features():
    generator = torch.Generator().manual_seed(4)
    ids = torch.arange(11)
    return torch.randn(11, 4, generator=generator), torch.randn(11, 4, generator=generator), ids, ids, ids // 2


def _recall_of_a_share(shares):
    recall = RetrievalRecall(match_equal_texts=True)
    columns = _features()
    start, stop = shares[rank()]
    for first in range(start, stop, 3):
        recall.update(*(column[first : min(first + 3, stop)] for column in columns))
    return recall.compute()


@pytest.mark.parametrize("shares", [[(0, 7), (7, 11)], [(0, 0), (0, 11)]])
def test_processes_with_uneven_or_empty_shares_all_get_the_recall_of_everything(shares):
    expected = RetrievalRecall(match_equal_texts=True)
    expected.update(*_features())
    assert run_distributed(_recall_of_a_share, shares) == [expected.compute()] * 2
