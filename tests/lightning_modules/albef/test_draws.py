import pytest
import torch

from vlightning.lightning_modules.albef import itm, mlm
from vlightning.lightning_modules.albef.settings import TextSettings

PAD, CLS, SEP, MASK, VOCAB = 0, 101, 102, 103, 1000


def _texts(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(200, VOCAB, (rows, length), generator=generator)
    ids[:, 0] = CLS
    ends = torch.randint(2, length, (rows,), generator=generator)
    ids[torch.arange(rows), ends] = SEP
    return ids.masked_fill(torch.arange(length) > ends[:, None], PAD)


def _mask(ids, probability=0.15):
    return mlm.draw_masked_tokens(ids, TextSettings(vocab_size=VOCAB, mask_probability=probability))


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
    similarity = torch.tensor([[9.0, 1.0, 0.0, 2.0]]).repeat(4, 1)
    forbidden = torch.eye(4, dtype=torch.bool)
    counts = torch.zeros(4)
    for _ in range(20_000):
        counts[itm.draw_hard_negatives(similarity, forbidden).row[0]] += 1
    expected = torch.tensor([1.0, 0.0, 2.0]).softmax(0)
    assert counts[0] == 0
    torch.testing.assert_close(counts[1:] / 20_000, expected, atol=0.015, rtol=0)


def test_batched_draw_equals_row_by_row_draws_under_one_seed():
    similarity, forbidden = torch.randn(32, 32), torch.eye(32, dtype=torch.bool)
    torch.manual_seed(7)
    batched = itm.draw_hard_negatives(similarity, forbidden).row
    torch.manual_seed(7)
    weights = similarity.masked_fill(forbidden, -torch.inf).softmax(-1)
    assert torch.equal(batched, torch.cat([torch.multinomial(row, 1) for row in weights]))


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_candidates_are_marked_and_draw_themselves(rows):
    drawn = itm.draw_hard_negatives(torch.randn(rows, rows), torch.ones(rows, rows, dtype=torch.bool))
    assert not drawn.exists.any()
    assert torch.equal(drawn.row, torch.arange(rows))


def test_masking_spares_special_tokens_and_keeps_the_stated_shares():
    torch.manual_seed(0)
    ids = _texts(50_000, 30)
    ordinary = (ids != PAD) & (ids != CLS) & (ids != SEP)
    masked = _mask(ids)
    chosen = torch.zeros_like(ids, dtype=torch.bool).flatten()
    chosen[masked.positions[masked.labels != -100]] = True
    chosen = chosen.view_as(ids)
    assert not (chosen & ~ordinary).any()
    assert torch.equal(masked.input_ids[~chosen], ids[~chosen])

    words = ordinary.sum()
    assert words > 500_000
    share = chosen.sum() / words
    assert abs(share - 0.15) < 4 * (0.15 * 0.85 / words) ** 0.5
    now, before = masked.input_ids[chosen], ids[chosen]
    picked = chosen.sum()
    for observed, expected in (
        ((now == MASK).double().mean(), 0.8 + 0.1 / VOCAB),
        ((now == before).double().mean(), 0.1 + 0.1 / VOCAB),
    ):
        assert abs(observed - expected) < 4 * (expected * (1 - expected) / picked) ** 0.5
    random = now[(now != MASK) & (now != before)]
    assert random.min() < 5  # over the whole vocabulary, special ids included
    assert random.max() > VOCAB - 5


def test_labels_are_the_original_ids_of_the_chosen_positions():
    torch.manual_seed(0)
    ids = _texts(16, 20)
    masked = _mask(ids, 0.5)
    kept = masked.labels != -100
    assert kept.sum() > 20
    assert torch.equal(ids.flatten()[masked.positions[kept]], masked.labels[kept])
    assert torch.isin((ids != masked.input_ids).flatten().nonzero().squeeze(1), masked.positions[kept]).all()


def test_nothing_chosen_still_gives_a_row_without_label():
    masked = _mask(_texts(4, 10), 0.0)
    assert masked.labels.tolist() == [-100]


def test_a_bounded_number_of_rows_unmasks_what_does_not_fit():
    ids = torch.full((2, 6), 300)
    chosen = torch.ones(2, 6, dtype=torch.bool)
    masked = mlm.select_positions(ids, torch.full_like(ids, MASK), chosen, rows=5)
    assert masked.positions.tolist() == [0, 1, 2, 3, 4]
    assert (masked.input_ids == MASK).sum() == 5
