"""Votes of nearest neighbours against a plain loop, and without the votes of samples with non-finite features."""

import pytest
import torch

from vlightning.metrics.classification import nearest_neighbours


def test_neighbours_vote_with_the_weight_of_their_cosine():
    features = torch.nn.functional.normalize(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    train, label = features[2:], torch.tensor([0, 1, 1, 2, 0])
    votes = nearest_neighbours(features[:2], train, label, 3, k=3, temperature=0.1)
    for row, feature in zip(votes, features[:2], strict=True):
        cosines = [(float(feature @ other), int(number)) for other, number in zip(train, label, strict=True)]
        slow = torch.zeros(3)
        for cosine, number in sorted(cosines, reverse=True)[:3]:
            slow[number] += torch.tensor(cosine / 0.1).exp()
        torch.testing.assert_close(row / row.sum(), slow / slow.sum())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_training_sample_with_a_non_finite_feature_has_no_vote(bad):
    features = torch.nn.functional.normalize(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    label, train = torch.arange(50) % 4, features.clone()
    train[7, 3] = bad
    others = torch.arange(50) != 7
    for k in (1, 60):
        votes = nearest_neighbours(features, train, label, 4, k)
        torch.testing.assert_close(votes, nearest_neighbours(features, train[others], label[others], 4, k))


def test_the_votes_for_a_sample_with_a_non_finite_feature_are_not_finite():
    features = torch.eye(3)
    features[1, 1] = torch.nan
    assert nearest_neighbours(features, torch.eye(3), torch.arange(3), 3).isfinite().all(1).tolist() == [
        True,
        False,
        True,
    ]
