"""Votes of nearest neighbours against a plain loop."""

import torch

from vlightning.metrics.neighbours import nearest_neighbours


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
