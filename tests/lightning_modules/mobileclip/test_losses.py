"""The reinforced loss of given terms; `test_contrast.py` tests the terms."""

import pytest
import torch

from vlightning.lightning_modules.losses.contrast import ContrastLosses
from vlightning.lightning_modules.mobileclip.module import reinforced_loss


@pytest.mark.parametrize(("weight", "expected"), [(0.0, 3.0), (0.75, 0.25 * 3 + 0.75 * 5), (1.0, 5.0)])
def test_loss_is_the_weighted_sum_of_contrast_and_distillation(weight, expected):
    assert reinforced_loss(ContrastLosses(*torch.tensor([3.0, 5.0, 7.0])), weight).item() == expected


@pytest.mark.parametrize(("weight", "unused"), [(0.0, "distillation"), (1.0, "contrast")])
def test_a_term_of_weight_zero_is_ignored(weight, unused):
    terms = ContrastLosses(*torch.ones(3))._replace(**{unused: torch.tensor(torch.nan)})
    assert reinforced_loss(terms, weight).item() == 1.0
