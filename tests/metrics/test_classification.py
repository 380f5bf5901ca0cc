"""Correct classes, accuracies and class recall."""

import pytest
import torch

from vlightning.metrics.classification import accuracies, class_recall, hits


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("classes", [3, 7])
def test_a_class_with_a_non_finite_score_is_a_miss(value, classes):
    scores = torch.arange(classes).expand(classes, -1).float()
    label = torch.arange(classes)
    expected = torch.zeros(classes, min(5, classes), dtype=torch.bool)
    for row in range(classes):
        if (place := classes - 1 - row) < 5:
            expected[row, place] = True
    assert torch.equal(hits(scores, label, 5), expected)
    assert not hits(torch.full_like(scores, value), label, 5).any()
    assert not hits(scores, label - classes, 5).any()
    # One class of all rows: its own image misses it, and those below it move up by a place.
    broken = scores.index_fill(1, torch.tensor(classes - 1), value)
    found = hits(broken, label, 5)
    assert not found[-1].any()
    assert found[:-1, 0].tolist() == (label[:-1] == classes - 2).tolist()


def test_accuracies_are_shares_of_all_images_in_percent():
    images, top1, top5 = torch.tensor([4, 0, 6]), torch.tensor([1, 0, 3]), torch.tensor([4, 0, 5])
    assert accuracies(images, top1, top5, classes=3) == {"top1": 40.0}
    assert accuracies(images, top1, top5, classes=6) == {"top1": 40.0, "top5": 90.0}
    assert accuracies(torch.tensor(8), torch.tensor(2), torch.tensor(4), classes=6) == {"top1": 25.0, "top5": 50.0}


def test_class_recall_is_the_mean_over_the_classes_that_occur():
    assert class_recall(torch.tensor([4, 0, 6]), torch.tensor([1, 0, 3])) == pytest.approx(100 * (0.25 + 0.5) / 2)
