from types import SimpleNamespace

import pytest
import torch

from vlightning.callbacks import draws
from vlightning.common.errors import UserError
from vlightning.lightning_modules.albef import itm, losses
from vlightning.lightning_modules.albef.settings import ContrastSettings


def test_negatives_never_come_from_the_same_row_or_image():
    torch.manual_seed(0)
    image_id = torch.tensor([1, 1, 2, 3, 2, 4, 5, 6])
    forbidden = image_id[:, None] == image_id
    for _ in range(200):
        drawn = itm.draw_hard_negatives(torch.randn(8, 8) * 20, forbidden)
        assert drawn.exists.all()
        assert not forbidden[torch.arange(8), drawn.row].any()


def test_negatives_survive_the_sharpest_temperature_and_identical_features():
    forbidden = torch.eye(6, dtype=torch.bool)
    # cosine 1 on the diagonal, -1 off it, over the smallest temperature: off-diagonal mass underflows after a softmax
    sharp = (2 * torch.eye(6) - 1) / 0.001
    for similarity in (sharp, torch.ones(6, 6) / 0.001):
        drawn = itm.draw_hard_negatives(similarity, forbidden)
        assert drawn.exists.all()
        assert (drawn.row != torch.arange(6)).all()


def test_negatives_follow_the_softmax_of_the_admissible_candidates():
    torch.manual_seed(0)
    similarity = torch.tensor([9.0, 1.0, 0.0, 2.0]).repeat(1, 250).expand(1000, -1)
    forbidden = torch.ones(1000, 1000, dtype=torch.bool)
    forbidden[4:, 1:4] = False
    drawn = torch.cat([itm.draw_hard_negatives(similarity, forbidden).row[4:] for _ in range(20)])
    counts = drawn.bincount(minlength=1000)
    expected = torch.tensor([1.0, 0.0, 2.0]).softmax(0)
    assert counts[1:4].sum() == len(drawn) == 19_920
    torch.testing.assert_close(counts[1:4] / len(drawn), expected, atol=0.015, rtol=0)


def test_negatives_within_parts_of_a_batch_are_those_of_smaller_batches(monkeypatch):
    """Four processes with a part each draw what one process draws from all parts."""
    batch = {"image_id": torch.arange(12), "input_ids": torch.arange(12)[:, None]}
    similarity = torch.randn(2, 12, 12)
    contrast = SimpleNamespace(image_logits=similarity[0], text_logits=similarity[1])
    draws.begin_step(7)
    whole = itm.draw_negatives(contrast, batch, ContrastSettings(negative_rows=3))
    parts = []
    for number in range(4):
        monkeypatch.setattr(draws, "rank", lambda number=number: number)
        own = slice(3 * number, 3 * number + 3)
        seen = SimpleNamespace(image_logits=similarity[0][own, own], text_logits=similarity[1][own, own])
        draws.begin_step(7)
        parts.append(
            itm.draw_negatives(seen, {name: column[own] for name, column in batch.items()}, ContrastSettings())
        )
    draws.begin_step(None)
    for kind in ("image", "text"):
        rows = [getattr(part, kind).row + 3 * number for number, part in enumerate(parts)]
        assert torch.equal(getattr(whole, kind).row, torch.cat(rows))
    assert not torch.equal(whole.image.row, whole.text.row)
    with pytest.raises(UserError, match=r"contrast\.negative_rows 5 divides, got 12"):
        itm.draw_negatives(contrast, batch, ContrastSettings(negative_rows=5))


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_candidates_are_marked_and_draw_themselves(rows):
    drawn = itm.draw_hard_negatives(torch.randn(rows, rows), torch.ones(rows, rows, dtype=torch.bool))
    assert not drawn.exists.any()
    assert torch.equal(drawn.row, torch.arange(rows))


def test_itm_omits_pairs_without_a_negative():
    logits = torch.randn(5, 2)
    labels, weights = torch.tensor([1, 1, 0, 0, 0]), torch.tensor([1.0, 1, 1, 0, 1])
    kept = weights.bool()
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    torch.testing.assert_close(losses.itm_loss(logits, labels, weights, weights.sum()), expected)
