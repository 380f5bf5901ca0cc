"""Linear probes on frozen features, and features that are not finite."""

import torch
from sklearn.linear_model import LogisticRegression

from vlightning.callbacks import OnlineLinearProbe
from vlightning.commands.evaluate.classification import few_shot, linear_probe


def test_the_linear_probe_is_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 4, (90,), generator=generator)
    features = torch.randn(90, 6, generator=generator, dtype=torch.float64) + 0.7 * torch.eye(6)[label]
    for c in (0.3, 10.0):
        theirs = LogisticRegression(C=c, tol=1e-10, max_iter=10_000).fit(features.numpy(), label.numpy())
        weight, bias = linear_probe(features, label, 4, c)
        torch.testing.assert_close(weight, torch.from_numpy(theirs.coef_), atol=2e-4, rtol=0)
        # Their bias is free up to a constant.
        intercept = torch.from_numpy(theirs.intercept_)
        torch.testing.assert_close(bias - bias.mean(), intercept - intercept.mean(), atol=2e-4, rtol=0)


def test_the_online_probe_converges_to_the_linear_probe():
    """Its LayerNorm stands before the classifier, and it has no penalty: C is infinite."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (60,), generator=generator)
    features = torch.randn(60, 5, generator=generator) + torch.eye(5)[label]
    probe = OnlineLinearProbe(3, learning_rate=0.05, weight_decay=0.0)
    for _ in range(400):
        probe._step(features, label)
    head, _ = probe._probe(features)
    normed = torch.nn.functional.layer_norm(features.double(), (5,), eps=1e-6)
    weight, bias = linear_probe(normed, label, 3, 1e9)
    theirs = LogisticRegression(C=1e9, tol=1e-10, max_iter=10_000).fit(normed.numpy(), label.numpy())
    expected = torch.from_numpy(theirs.predict_proba(normed.numpy()))
    torch.testing.assert_close((normed @ weight.T + bias).softmax(1), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(head(features).softmax(1).double(), expected, atol=2e-3, rtol=0)


def test_shots_are_a_number_of_samples_of_each_class_by_seed():
    label = torch.tensor([0] * 10 + [1] * 3 + [2])
    chosen = few_shot(label, 3, seed=0)
    assert label[chosen].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert chosen.tolist() == few_shot(label, 3, seed=0).tolist() != few_shot(label, 3, seed=1).tolist()
    assert few_shot(label, None, seed=0).tolist() == list(range(14))
