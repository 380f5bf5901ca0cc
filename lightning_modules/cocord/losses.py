"""CoCoRD's losses. Queries and keys come as the heads give them; both are normalised here, in float32 at least."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..networks.precision import at_least_float32, unit


def contrastive_loss(query: Tensor, key: Tensor, dictionary: Tensor, valid: Tensor, temperature: float) -> Tensor:
    """InfoNCE of the student's queries against the teacher's dictionary (eq. 2).

    The positive of a query is the key of its own image; the negatives are the dictionary, the same for all queries.
    (The paper writes no norm; its temperature and the authors' code imply cosines.)

    Args:
        query: [B, E].
        key: [B, E], without gradient.
        dictionary: keys of earlier batches at unit length, [N, E].
        valid: which slots of the dictionary are filled, bool [N].
        temperature: what cosines are divided by.

    Returns:
        Mean over the batch.
    """
    query, key = unit(query), unit(key)
    positive = (query * key).sum(-1, keepdim=True)
    negatives = (query @ dictionary.to(query.dtype).T).masked_fill(~valid, -torch.inf)
    scores = torch.cat([positive, negatives], 1) / temperature
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def prediction_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared distance of unit vectors, 2 - 2 cos, in [0, 4] (eqs. 6 and 7), mean over the batch.

    Args:
        prediction: the predictor's output [B, E].
        target: the cognate key of another view [B, E], without gradient.
    """
    return (2 - 2 * (unit(prediction) * unit(target)).sum(-1)).mean()


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL divergence from the teacher's softened distribution, times T^2 (Hinton et al., arXiv 1503.02531).

    Args:
        logits: the student's [B, C].
        teacher_logits: [B, C], without gradient.
        temperature: T.

    Returns:
        Summed over classes, mean over the batch.
    """
    student = F.log_softmax(at_least_float32(logits) / temperature, -1)
    teacher = F.log_softmax(at_least_float32(teacher_logits) / temperature, -1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
