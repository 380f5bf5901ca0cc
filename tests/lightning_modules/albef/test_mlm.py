import math

import pytest
import torch

from vlightning.lightning_modules.albef import losses, mlm
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


def test_mlm_equals_a_slow_reference_and_ignores_unlabeled_rows():
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 6, 9, dtype=torch.float64)
    labels = torch.tensor([3, -100, 0, 8, -100, 2])
    total = 0.0
    for row, soft, label in zip(logits.tolist(), teacher.tolist(), labels.tolist(), strict=True):
        if label == -100:
            continue
        log_sum = math.log(sum(map(math.exp, row)))
        weights = [math.exp(x) / sum(map(math.exp, soft)) for x in soft]
        total += 0.7 * (log_sum - row[label]) + 0.3 * sum(w * (log_sum - x) for w, x in zip(weights, row, strict=True))
    loss = losses.mlm_loss(logits, teacher, labels, 0.3, torch.tensor(4.0))
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_mlm_without_any_label_is_zero_with_a_finite_gradient():
    logits = torch.randn(1, 9, requires_grad=True)
    loss = losses.mlm_loss(logits, torch.randn(1, 9), torch.tensor([-100]), 0.4, torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(1, 9))
