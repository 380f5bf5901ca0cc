"""Metrics by class and by group against scikit-learn and slow counts."""

import pytest
import torch
from sklearn.metrics import f1_score, recall_score

from vlightning.metrics.groups import group_means, jaccard, macro_f1, mean_per_class_recall


@pytest.fixture
def labels():
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 9, (200,), generator=generator)
    label[label == 4] = 5  # a class that occurs among the predictions only
    return torch.where(torch.rand(200, generator=generator) < 0.6, label, torch.randint(0, 9, (200,))), label


def test_recall_and_f1_are_those_of_scikit_learn_over_the_classes_that_occur(labels):
    predicted, label = labels
    of = label.unique()
    assert mean_per_class_recall(predicted, label) == pytest.approx(
        recall_score(label, predicted, average="macro", labels=of), abs=1e-6
    )
    assert macro_f1(predicted, label) == pytest.approx(f1_score(label, predicted, average="macro", labels=of))


def test_groups_without_samples_and_left_out_groups_have_no_mean():
    values, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 2, 5])
    assert group_means(values, group, left_out=[5]) == {0: 0.5, 2: 1.0}


def test_jaccard_is_the_overlap_of_two_sets():
    chosen, right = torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([0, 1, 1, 0]).bool()
    assert jaccard(chosen, right) == 1 / 3


def test_a_sample_without_a_predicted_class_is_wrong():
    label = torch.tensor([0, 0, 1])
    assert mean_per_class_recall(torch.tensor([-1, 0, 1]), label) == 0.75
    assert macro_f1(torch.tensor([-1, 0, 1]), label) == pytest.approx((2 / 3 + 1) / 2)
