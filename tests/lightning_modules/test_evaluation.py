import pytest
import torch

from support.distributed import run_distributed
from vlightning.callbacks import rank
from vlightning.lightning_modules.evaluation import RetrievalEvaluation

IMAGES = 23
NAMES = [f"{way}_r{k}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)] + ["recall_mean"]


class Scorer:
    """Prefers pictures and texts whose numbers are close, which the features know nothing of."""

    device = torch.device("cpu")

    def text_states(self, input_ids, attention_mask):
        return input_ids[..., None].float()

    def match_scores(self, text_states, attention_mask, image_tokens):
        return -(text_states[:, 0, 0] - image_tokens[0, 0, 0]).abs()


def _add(evaluation, start, stop, step=4):
    generator = torch.Generator().manual_seed(4)
    image, text = (torch.randn(IMAGES, 4, generator=generator) for _ in range(2))
    numbers = torch.arange(IMAGES)
    for first in range(start, stop, step):
        rows = slice(first, min(first + step, stop))
        width = 1 + first % 3  # batches are padded to their own longest text
        ids = numbers[rows, None].expand(-1, width).clone()
        evaluation.add_images(image[rows], numbers[rows], numbers[rows], numbers[rows, None, None].float())
        evaluation.add_texts(text[rows], ids, torch.ones_like(ids), numbers[rows], numbers[rows] // 2)
    return evaluation


def _recalls_of_a_share(shares):
    evaluation = RetrievalEvaluation(match_equal_texts=True, rerank_k=12, rerank_rows=5)
    result = _add(evaluation, *shares[rank()]).compute(Scorer())
    return result.recalls, result.near_images.index, result.near_texts.match_score


@pytest.mark.parametrize("shares", [[(0, 15), (15, IMAGES)], [(0, 0), (0, IMAGES)]])
def test_processes_with_uneven_or_empty_shares_all_get_the_result_of_everything(shares):
    expected = _recalls_of_a_share([(0, IMAGES)])
    assert len(expected[0]) == 14
    for recalls, *tensors in run_distributed(_recalls_of_a_share, shares):
        assert recalls == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected[1:], strict=True))


@pytest.mark.parametrize(("score", "weight"), [("itm", 0), ("itm+itc", 1), ("itm+itc_logits", 20)])
def test_the_matching_score_decides_the_order_of_the_candidates(score, weight):
    result = _add(RetrievalEvaluation(rerank_k=10, rerank_score=score), 0, IMAGES).compute(Scorer(), temperature=0.05)
    plain = _add(RetrievalEvaluation(rerank_k=10), 0, IMAGES).compute()
    for near, before in ((result.near_texts, plain.near_texts), (result.near_images, plain.near_images)):
        distance = (near.index - torch.arange(IMAGES)[:, None]).abs().float()
        assert torch.equal(near.match_score, -distance)
        order_by = near.match_score + weight * near.similarity
        assert (order_by.diff(dim=1) <= 1e-5).all()
        assert torch.equal(near.index.sort(1).values, before.index.sort(1).values)
    # The scorer puts the match first wherever it is a candidate: recall at 1 becomes recall at 10 of the contrast.
    if score == "itm":
        assert result.recalls["rerank_text_to_image_r1"] == plain.recalls["text_to_image_r10"]
        assert result.recalls["rerank_image_to_text_r1"] == plain.recalls["image_to_text_r10"]
    assert {k: v for k, v in result.recalls.items() if not k.startswith("rerank")} == plain.recalls


def test_features_are_kept_in_main_memory_in_float32():
    evaluation = RetrievalEvaluation()
    evaluation.add_images(torch.ones(2, 4, dtype=torch.bfloat16), torch.arange(2), torch.arange(2))
    assert evaluation._images[0][0].dtype == torch.float32
    assert evaluation._images[0][0].device.type == "cpu"


def test_pictures_alone_and_texts_alone_have_features_and_no_recall():
    pictures, texts = RetrievalEvaluation(), RetrievalEvaluation()
    pictures.add_images(torch.randn(3, 4), torch.arange(3), torch.arange(3))
    texts.add_texts(torch.randn(5, 4), torch.ones(5, 2).long(), torch.ones(5, 2).long(), text_index=torch.arange(5))
    found = pictures.compute(Scorer()), texts.compute(Scorer())
    assert [len(r.image_features) for r in found] == [3, 0]
    assert [len(r.text_features) for r in found] == [0, 5]
    assert [r.recalls for r in found] == [{}, {}]
    assert found[1].near_images.index.shape == (5, 0)


def test_fewer_candidates_than_the_recalls_are_refused():
    with pytest.raises(ValueError, match="rerank_k=5 is below 10"):
        RetrievalEvaluation(rerank_k=5)


@pytest.mark.parametrize("protocols", [["karpathy5", "paper"], ["paper"], ["karpathy5"]])
def test_protocols_rank_all_captions_or_the_first_of_each_picture(protocols):
    """Three pictures, captions 0 and 1, 2 and 3, 4; similarities by hand."""
    evaluation = RetrievalEvaluation(protocols=protocols)
    scores = torch.tensor(
        [
            [0.5, 0.9, 0.6, 0.1, 0.2],  # the second caption is first, the first one third, of first captions second
            [0.7, 0.0, 0.7, 0.8, 0.3],  # the first caption ties with a wrong one, which counts as before it
            [0.1, 0.2, 0.3, 0.0, 0.4],
        ]
    )
    evaluation.add_images(torch.eye(3), torch.tensor([7, 3, 5]), torch.arange(3))
    ids = torch.ones(5, 2).long()
    evaluation.add_texts(scores.T, ids, ids, torch.tensor([7, 7, 3, 3, 5]), torch.arange(5))
    found = evaluation.compute().recalls
    assert list(found) == [f"{protocol}/{name}" for protocol in protocols for name in NAMES]
    third = 100 / 3
    if "karpathy5" in protocols:
        assert found["karpathy5/image_to_text_r1"] == pytest.approx(100)
        # Captions 1, 2, 3 and 4 have their own picture first; caption 0 has picture 1 before it.
        assert found["karpathy5/text_to_image_r1"] == pytest.approx(80)
    if "paper" in protocols:
        assert found["paper/image_to_text_r1"] == pytest.approx(third)
        assert found["paper/text_to_image_r1"] == pytest.approx(2 * third)
        assert found["paper/image_to_text_r5"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocols": []}, "Found no name in protocols"),
        ({"protocols": ["paper"], "rerank_k": 10}, "beside rerank_k=10"),
    ],
)
def test_protocols_that_cannot_be_are_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        RetrievalEvaluation(**options)
