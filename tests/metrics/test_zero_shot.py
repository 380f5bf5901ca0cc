"""Prompts, class embeddings and scores of zero-shot classification."""

import torch
from torch.nn.functional import cosine_similarity, normalize

from vlightning.metrics.classification import class_embeddings, class_prompts, zero_shot_scores


def test_every_name_is_in_every_template_class_by_class():
    assert class_prompts(["cat", "{x}"], ["a {}.", "the {}!"]) == ["a cat.", "the cat!", "a {x}.", "the {x}!"]


def test_a_class_is_the_normalized_mean_of_its_normalized_prompts():
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randn(6, 5, generator=generator) * torch.tensor([[1.0], [100], [3], [0.1], [7], [1]])
    classes = class_embeddings(prompts, 3)
    for number in range(2):
        expected = torch.stack([row / row.norm() for row in prompts[3 * number : 3 * number + 3]]).mean(0)
        torch.testing.assert_close(classes[number], expected / expected.norm())
    assert class_embeddings(prompts.bfloat16(), 3).dtype == torch.float32
    assert class_embeddings(prompts.double(), 3).dtype == torch.float64


def test_scores_order_the_classes_as_cosines_do():
    generator = torch.Generator().manual_seed(0)
    images, classes = torch.randn(4, 5, generator=generator), normalize(torch.randn(3, 5, generator=generator), dim=1)
    expected = cosine_similarity(images[:, None], classes[None], dim=-1)
    scores = zero_shot_scores(images, classes)
    assert torch.equal(scores.argsort(1), expected.argsort(1))
    torch.testing.assert_close(scores / images.norm(dim=1, keepdim=True), expected)
