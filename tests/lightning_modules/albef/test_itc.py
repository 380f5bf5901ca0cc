import math

import pytest
import torch

from vlightning.lightning_modules.albef import losses
from vlightning.lightning_modules.losses.soft_targets import soft_cross_entropy


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
        torch.testing.assert_close(losses.contrastive_targets(teacher, positives, alpha), target)
    expected = (_slow_soft_cross_entropy(image, targets[0]) + _slow_soft_cross_entropy(text, targets[1])) / 2
    assert losses.itc_loss(image, text, *targets).item() == pytest.approx(expected, rel=1e-12)


def test_itc_differs_from_the_papers_kl_form_only_by_a_constant():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    teacher, positives = torch.randn(4, 6, dtype=torch.float64), torch.eye(4, 6, dtype=torch.bool)
    ours = soft_cross_entropy(logits.log_softmax(-1), losses.contrastive_targets(teacher, positives, 0.4)).mean()
    hard = torch.nn.functional.cross_entropy(logits, torch.arange(4))
    soft = torch.nn.functional.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    gradient, expected = (torch.autograd.grad(x, logits)[0] for x in (ours, 0.6 * hard + 0.4 * soft))
    torch.testing.assert_close(gradient, expected)
