"""Zero-shot classification from features alone: prompts of class names, class embeddings, scores."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def class_prompts(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return every name in every template, all prompts of a class one after the other.

    Args:
        names: Class names.
        templates: Texts with one `{}`, where the name goes.
    """
    return [template.replace("{}", name) for name in names for template in templates]


def class_embeddings(prompt_features: Tensor, templates: int) -> Tensor:
    """Return unit-length embeddings [C, E]: the normalized mean of the normalized features of a class's prompts.

    Args:
        prompt_features: Features [C * templates, E] of the prompts in the order of `class_prompts`.
        templates: Number of prompts of a class.
    """
    prompts = normalize(_at_least_float32(prompt_features), dim=-1).unflatten(0, (-1, templates))
    return normalize(prompts.mean(1), dim=-1)


def zero_shot_scores(image_features: Tensor, class_embeddings: Tensor) -> Tensor:
    """Return scores [B, C] that order the classes of an image as the cosines do.

    Args:
        image_features: Features [B, E] of any length, which does not change the order.
        class_embeddings: Unit-length embeddings [C, E].
    """
    return _at_least_float32(image_features) @ class_embeddings.T


def _at_least_float32(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))
