"""Text assignment: the draws against a slow reference, and the loss and its gradients."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from support.methods.tasks import random_task_batch, tiny_task
from vlightning.lightning_modules.albef.downstream import assignment
from vlightning.lightning_modules.albef.downstream.assignment import Assignment, draw_assignment

SEVEN = torch.tensor([[1.0, 0.0], [0.98, 0.2], [0.9, 0.43], [0.0, 1.0]])


def _slow(features, generator):
    """The authors' loop over the rows: images of one text each, and its class."""
    weights = torch.softmax(features @ features.T / 0.07, 1).fill_diagonal_(0)
    drawn = []
    for row in range(len(features)):
        if torch.rand(1, generator=generator) > 1 / 3:
            other = int(torch.multinomial(weights[row], 1, generator=generator))
            own_first = torch.rand(1, generator=generator) > 0.5
            drawn.append((row, other, 0) if own_first else (other, row, 1))
        else:
            first, second = torch.multinomial(weights[row], 2, generator=generator).tolist()
            drawn.append((first, second, 2))
    return drawn


def test_images_are_drawn_with_the_chances_of_the_authors_loop():
    features = F.normalize(SEVEN, dim=-1)
    rounds = 4000
    generator = torch.Generator().manual_seed(0)
    expected = Counter((row, *one) for _ in range(rounds) for row, one in enumerate(_slow(features, generator)))
    torch.manual_seed(0)
    found = Counter()
    for _ in range(rounds):
        drawn = draw_assignment(features, torch.eye(4, dtype=torch.bool))
        assert drawn.exists.all()
        found.update((row, *one) for row, one in enumerate(zip(*map(torch.Tensor.tolist, drawn[:3]), strict=True)))
    for case in expected.keys() | found.keys():
        deviation = max(expected[case], found[case]) ** 0.5
        assert abs(expected[case] - found[case]) < 6 * max(deviation, 1), case


def test_forbidden_images_are_never_drawn_and_sharp_similarities_have_a_defined_outcome():
    features = F.normalize(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    forbidden = torch.eye(5, dtype=torch.bool)
    forbidden[0, 1:4] = True  # one candidate
    forbidden[1] = True  # none
    for seed in range(50):
        torch.manual_seed(seed)
        drawn = draw_assignment(features.repeat(1, 40), forbidden)  # probabilities that underflow
        assert drawn.exists.tolist() == [True, False, True, True, True]
        assert drawn.label[0] < 2
        for row in (0, 2, 3, 4):
            images = [int(drawn.left[row]), int(drawn.right[row])]
            others = [image for image in images if not forbidden[row, image]]
            assert images[0] != images[1]
            assert len(others) == (1 if drawn.label[row] < 2 else 2), row
            assert drawn.label[row] == 2 or images[int(drawn.label[row])] == row
    alone = draw_assignment(features[:1], forbidden[:1, :1])
    assert not alone.exists.any()


@pytest.mark.parametrize("memory", [{}, {"micro_batch_size": 2, "activation_checkpointing": True}])
def test_a_step_classifies_the_drawn_images_and_leaves_the_projections_alone(monkeypatch, memory):
    module = tiny_task("assignment", memory=memory).eval()
    batch = random_task_batch("assignment", 4)
    drawn = Assignment(
        torch.tensor([0, 2, 1, 3]),
        torch.tensor([1, 1, 3, 0]),
        torch.tensor([0, 1, 2, 0]),
        torch.tensor([True, True, False, True]),
    )
    monkeypatch.setattr(assignment, "draw_assignment", lambda *_: drawn)
    module.log = lambda *_, **__: None
    loss = module.training_step(batch, 0)
    losses = []
    for row in (0, 1, 3):
        text = batch["input_ids"][row : row + 1], batch["attention_mask"][row : row + 1]
        images = [batch["image"][index[row] : index[row] + 1] for index in (drawn.left, drawn.right)]
        losses.append(F.cross_entropy(module.student(*text, *images), drawn.label[row : row + 1]))
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-6, atol=1e-6)
    loss.backward()
    without = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert without == {f"student.{part}_proj.{kind}" for part in ("vision", "text") for kind in ("weight", "bias")}
    batch = random_task_batch("assignment", 1)
    monkeypatch.undo()
    module.log = lambda *_, **__: None
    assert module.training_step(batch, 0) == 0  # no negative in a batch of one
