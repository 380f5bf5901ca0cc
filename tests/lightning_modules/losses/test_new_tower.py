"""Losses of a new tower against the formulas written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from vlightning.lightning_modules.losses.new_tower import TowerFeatures, as_int8, new_tower_losses

B, D, SCALE = 6, 16, 7.0


def features(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)

    def unit():
        return F.normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1)

    new, old, partner = (changes.get(name, unit()) for name in ("new", "old", "partner"))
    return TowerFeatures(new, old, partner, new, old, partner, SCALE)


def divergence(new, partner, old, whole_partner):
    """KL(old || new) of the similarities, mean of both directions, with loops."""
    total = 0.0
    for ours, others, teacher, whole in ((new, partner, old, whole_partner), (partner, new, whole_partner, old)):
        for row in range(B):
            student = torch.tensor([SCALE * float(ours[row] @ others[column]) for column in range(B)])
            target = torch.tensor([SCALE * float(teacher[row] @ whole[column]) for column in range(B)])
            p, q = target.softmax(0), student.softmax(0)
            total += float((p * (p / q).log()).sum()) / B / 2
    return total


def test_a_tower_with_the_old_features_has_no_loss():
    given = features()
    losses = new_tower_losses(given._replace(new=given.old, all_new=given.old))
    assert losses.feature == pytest.approx(0, abs=1e-12)
    assert losses.similarity == pytest.approx(0, abs=1e-12)
    assert losses.contrast == 0


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_losses_are_those_of_the_formulas(chunk):
    given = features()
    losses = new_tower_losses(given, chunk=chunk, contrast=True)
    assert losses.feature == pytest.approx(1 - sum(float(a @ b) for a, b in zip(given.new, given.old, strict=True)) / B)
    assert losses.similarity == pytest.approx(divergence(given.new, given.partner, given.old, given.partner), rel=1e-5)
    logits = SCALE * given.new @ given.partner.T
    rows = torch.arange(B)
    assert losses.contrast == pytest.approx(float(F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2)


def test_each_prefix_ranks_as_the_whole_and_points_as_the_old_prefix():
    given = features()
    whole = new_tower_losses(given)
    both = new_tower_losses(given, [4])
    new, old, partner = (F.normalize(part[:, :4], dim=1) for part in (given.new, given.old, given.partner))
    prefix = divergence(new, partner, given.old, given.partner)  # the targets are those of the whole
    assert both.similarity == pytest.approx((float(whole.similarity) + prefix) / 2, rel=1e-5)
    cosine = float((new * old).sum(1).mean())
    assert both.feature == pytest.approx((float(whole.feature) + 1 - cosine) / 2)


def test_features_of_an_int8_index_are_in_steps_of_a_127th_and_pass_the_gradient():
    unit = torch.tensor([[0.6, 0.8], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    found = as_int8(unit)
    stored = torch.tensor([76.0, 102.0], dtype=torch.float64)  # 0.6 and 0.8 of 127, rounded
    torch.testing.assert_close(found[0].detach(), stored / math.hypot(76, 102))
    found[0, 0].backward()
    assert unit.grad[0].abs().min() > 0  # as without rounding, where rounding alone has none


def test_int8_changes_the_similarities_and_not_the_features():
    given = features()
    plain, rounded = new_tower_losses(given), new_tower_losses(given, int8=True)
    assert plain.feature == rounded.feature
    assert plain.similarity != rounded.similarity
    assert rounded.similarity == pytest.approx(float(plain.similarity), rel=0.2)
