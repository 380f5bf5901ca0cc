"""The warning about a contrastive loss at the value of chance."""

import pytest
import torch

from vlightning.callbacks import StuckLossWarning
from vlightning.common.errors import UserError


@pytest.mark.parametrize(("shares", "warnings"), [((0.99, 1.0), 1), ((0.9, 0.9), 0), ((0.5, 1.0), 1)])
def test_a_loss_at_chance_is_named_once(shares, warnings, capsys):
    callback = StuckLossWarning(steps=10)
    for share in [shares[0]] * 10 + [shares[1]] * 30:
        callback.on_train_batch_end(None, None, {"loss_share": torch.tensor(share)}, None, 0)
    assert capsys.readouterr().err.count("times ln B") == warnings


def test_a_step_that_returned_nothing_is_left_alone(capsys):
    StuckLossWarning(steps=1).on_train_batch_end(None, None, None, None, 0)
    assert not capsys.readouterr().err


def test_a_step_without_the_share_is_refused():
    with pytest.raises(UserError, match=r"Expected the loss as a share of ln B, 'share', .* got \['loss'\]: return it"):
        StuckLossWarning("share").on_train_batch_end(None, None, {"loss": torch.ones(())}, None, 0)
