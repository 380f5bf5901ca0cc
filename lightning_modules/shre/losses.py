"""SHRe's losses (listing 2).

Shapes: B pairs of this process, C classes.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...callbacks.distributed.collectives import gather, rank
from ..core.precision import at_least_float32, unit
from ..losses.contrast import PairFeatures, contrast_losses


def posterior_divergence(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute T^2 KL(teacher || student) of class posteriors, mean over the pairs.

    The argument order is that of the listing's `kl_div`, the teacher first; torch's function of that name takes the
    student's log-probabilities first.

    Args:
        target: the teacher's logits of the image [B, C]; no gradient flows to them.
        logits: the student's logits of the image or of its caption [B, C].
        temperature: temperature T of both; T^2 preserves the scale of the gradient (Hinton et al. 2015). The thesis has
            1.
    """
    teacher = F.log_softmax(at_least_float32(target.detach()) / temperature, -1)
    student = F.log_softmax(at_least_float32(logits) / temperature, -1)
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def posterior_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the mean entropy, in nats, of the class posteriors of logits [B, C]; at most log C."""
    log_posterior = F.log_softmax(at_least_float32(logits) / temperature, -1)
    return -(log_posterior.exp() * log_posterior).sum(-1).mean()


def contrasts(
    images: Mapping[str, Tensor],
    texts: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    ids: tuple[Tensor, Tensor] | None = None,
    rows: int | None = None,
) -> dict[str, Tensor]:
    """Compute CLIP's loss of each contrasted result, over the pairs of all processes.

    Args:
        images: results of the images [B, ...] by name.
        texts: results of the captions [B, ...] by name.
        scales: logarithm of the inverse temperature [1] of each contrasted result.
        ids: ids of `pair_ids`; pairs that share one are no negatives of each other.
        rows: rows of the logits that are held at a time; None holds all.
    """
    own = [unit(side[name]) for side in (images, texts) for name in scales]
    everyone = gather(torch.cat(own, 1), gradient=True).split([part.shape[1] for part in own], 1)
    losses = {}
    for image, name in enumerate(scales):
        text = image + len(scales)
        pairs = PairFeatures(own[image], own[text], everyone[image], everyone[text], scales[name].exp())
        offset = rank() * len(own[image])
        losses[name] = contrast_losses(pairs, [], offset, rows, ids).contrast
    return losses
