import math

import pytest
import torch

from vlightning.lightning_modules.albef import itc, itm, mlm


def _slow_soft_cross_entropy(logits, targets):
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        peak = max(row)
        log_sum = peak + math.log(sum(math.exp(x - peak) for x in row))
        total -= sum(t * (x - log_sum) for x, t in zip(row, target, strict=True))
    return total / len(logits)


@pytest.mark.parametrize(("rows", "columns", "alpha"), [(1, 1, 0.4), (3, 7, 0.0), (5, 11, 0.4), (4, 4, 1.0)])
def test_itc_equals_a_slow_reference(rows, columns, alpha):
    torch.manual_seed(rows)
    image, text, teacher_image, teacher_text = torch.randn(4, rows, columns, dtype=torch.float64) * 3
    positives = torch.rand(rows, columns) < 0.4
    positives[torch.arange(rows), torch.arange(rows)] = True
    targets = []
    for teacher in (teacher_image, teacher_text):
        target = torch.zeros(rows, columns, dtype=torch.float64)
        for b in range(rows):
            soft = [math.exp(x) for x in teacher[b].tolist()]
            for m in range(columns):
                truth = positives[b, m].item() / positives[b].sum().item()
                target[b, m] = alpha * soft[m] / sum(soft) + (1 - alpha) * truth
        targets.append(target)
        torch.testing.assert_close(itc.contrastive_targets(teacher, positives, alpha), target)
    expected = (_slow_soft_cross_entropy(image, targets[0]) + _slow_soft_cross_entropy(text, targets[1])) / 2
    assert itc.itc_loss(image, text, *targets).item() == pytest.approx(expected, rel=1e-12)


def test_itc_differs_from_the_papers_kl_form_only_by_a_constant():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    teacher, positives = torch.randn(4, 6, dtype=torch.float64), torch.eye(4, 6, dtype=torch.bool)
    ours = itc.soft_cross_entropy(logits, itc.contrastive_targets(teacher, positives, 0.4))
    hard = torch.nn.functional.cross_entropy(logits, torch.arange(4))
    soft = torch.nn.functional.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    gradient, expected = (torch.autograd.grad(x, logits)[0] for x in (ours, 0.6 * hard + 0.4 * soft))
    torch.testing.assert_close(gradient, expected)


def test_mlm_equals_a_slow_reference_and_ignores_unlabelled_rows():
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
    loss = mlm.mlm_loss(logits, teacher, labels, 0.3, torch.tensor(4.0))
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_mlm_without_any_label_is_zero_with_a_finite_gradient():
    logits = torch.randn(1, 9, requires_grad=True)
    loss = mlm.mlm_loss(logits, torch.randn(1, 9), torch.tensor([-100]), 0.4, torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(1, 9))


def test_itm_leaves_out_pairs_that_could_not_be_formed():
    logits = torch.randn(5, 2)
    labels, weights = torch.tensor([1, 1, 0, 0, 0]), torch.tensor([1.0, 1, 1, 0, 1])
    kept = weights.bool()
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    torch.testing.assert_close(itm.itm_loss(logits, labels, weights, weights.sum()), expected)
