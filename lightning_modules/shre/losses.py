"""SHRe's divergence from the teacher's posterior (listing 2); its contrast is CLIP's, `contrast_terms`.

Shapes: B pairs, C classes.
"""

import torch.nn.functional as F
from torch import Tensor

from ..networks.precision import at_least_float32


def posterior_divergence(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) of the class posteriors, times the squared temperature, mean over the pairs.

    In the order of the listing's `kl_div`: logits of the teacher first. (torch's function of that name takes the
    student's log-probabilities first.)

    Args:
        target: the teacher's logits of the image [B, C]; without gradient.
        logits: the student's, of the image or of its caption [B, C].
        temperature: both are divided by it; the square keeps the size of the gradient (Hinton et al. 2015). The origin
            has 1.
    """
    teacher = F.log_softmax(at_least_float32(target.detach()) / temperature, -1)
    student = F.log_softmax(at_least_float32(logits) / temperature, -1)
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def posterior_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean entropy, nats, of the class posteriors of logits [B, C]; at most log C, where all classes are as likely."""
    log_posterior = F.log_softmax(at_least_float32(logits) / temperature, -1)
    return -(log_posterior.exp() * log_posterior).sum(-1).mean()
