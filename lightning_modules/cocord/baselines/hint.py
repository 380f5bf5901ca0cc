"""FitNet's hint (Romero et al., arXiv 1412.6550): the teacher's map of the second stage, regressed by the student's.

The CRD benchmark trains the regressor together with the student, not in a stage before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....common.errors import UserError
from ...core.precision import at_least_float32
from ...networks.cifar import Classifier

STAGE = 1  # the second of those without the stem, the benchmark's default


class Hint(nn.Module):
    """Regress the teacher's map from the student's with a convolution, BatchNorm and ReLU.

    The convolution is 1x1; where one map is twice as large, it is 3x3 with stride 2, or transposed 4x4 with stride 2.

    Args:
        student: the student's network.
        teacher: the teacher's network.

    Raises:
        UserError: If one map is more than twice as large as the other.
    """

    def __init__(self, student: Classifier, teacher: Classifier) -> None:
        super().__init__()
        (inputs, own), (outputs, other) = _shape(student), _shape(teacher)
        convolution: nn.Module
        if own == other:
            convolution = nn.Conv2d(inputs, outputs, 1)
        elif own == 2 * other:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        elif 2 * own == other:
            convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1)
        else:
            raise UserError(
                "Expected maps of equal size, or one of twice the other's, in the second stages for kd.hint_weight, "
                f"got {own} and {other} positions a side: use another student or teacher."
            )
        self.regressor = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Compute the mean squared error of the student's map [B, D, H, W] and the teacher's [B, E, I, J]."""
        return F.mse_loss(at_least_float32(self.regressor(student)), at_least_float32(teacher))


@torch.no_grad()
def _shape(network: Classifier) -> tuple[int, int]:
    """Return channels and side of the map."""
    was, side = network.training, network.image_size or 32
    maps = network.eval().forward_stages(torch.zeros(1, 3, side, side)).maps
    network.train(was)
    return maps[STAGE].shape[1], maps[STAGE].shape[-1]
