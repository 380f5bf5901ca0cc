"""CoCoRD's losses. They normalize queries and keys, in float32 at least.

Shapes: B images of this process, E values of a query or key, N slots of the dictionary, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...callbacks import FeatureQueue
from ...callbacks.distributed.collectives import world_size
from ...common.errors import UserError
from ..core.precision import unit


def dictionary_loss(query: Tensor, key: Tensor, dictionary: FeatureQueue, temperature: float) -> Tensor:
    """Compute the contrastive loss (eq. 2) with the dictionary as negatives, without autocast.

    Args:
        query: the student's queries [B, E].
        key: the teacher's keys of the same images [B, E], without gradient.
        dictionary: keys of earlier batches.
        temperature: temperature tau.

    Raises:
        UserError: If the dictionary is smaller than the global batch.
    """
    batch = len(key) * world_size()
    if batch > dictionary.size:
        raise UserError(
            f"Expected a queue of at least {batch} keys, the global batch, got queue_size {dictionary.size}: raise "
            "model.contrast.queue_size, or lower the batch size."
        )
    with torch.autocast(query.device.type, enabled=False):
        return contrastive_loss(query, key, dictionary.features, dictionary.valid, temperature)


def same_class_share(label: Tensor, dictionary: FeatureQueue) -> Tensor:
    """Return the share of false negatives: keys in the dictionary with the class of the query, for labels [B]."""
    valid = dictionary.valid
    same = (label[:, None] == dictionary.ids) & valid
    return same.sum() / (valid.sum().clamp(min=1) * len(label))


def contrastive_loss(query: Tensor, key: Tensor, dictionary: Tensor, valid: Tensor, temperature: float) -> Tensor:
    """Compute InfoNCE of queries against their keys and a dictionary (eq. 2).

    The positive of a query is the key of the same image; all keys of the dictionary are negatives. (Eq. 2 has no norms;
    the paper's temperature and the authors' code imply cosines.)

    Args:
        query: queries [B, E].
        key: keys [B, E], without gradient.
        dictionary: unit keys of earlier batches [N, E].
        valid: mask of the filled slots of the dictionary, bool [N].
        temperature: temperature tau.

    Returns:
        Mean over the batch.
    """
    query = unit(query)
    key = unit(key)
    positive = (query * key).sum(-1, keepdim=True)
    negatives = (query @ dictionary.to(query.dtype).T).masked_fill(~valid, -torch.inf)
    scores = torch.cat([positive, negatives], 1) / temperature
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def prediction_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Compute the squared distance of unit vectors, 2 - 2 cos (eqs. 6 and 7), mean over the batch.

    Args:
        prediction: output of the predictor [B, E].
        target: cognate key of the other view [B, E], without gradient.
    """
    return (2 - 2 * (unit(prediction) * unit(target)).sum(-1)).mean()
