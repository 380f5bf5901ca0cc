"""The warning about a contrastive loss at the value of chance."""

from types import SimpleNamespace

import pytest
import torch

from vlightning.callbacks import StuckLossWarning


@pytest.mark.parametrize(("shares", "warnings"), [((0.99, 1.0), 1), ((0.9, 0.9), 0), ((0.5, 1.0), 1)])
def test_a_loss_at_chance_is_named_once(shares, warnings, capsys):
    callback = StuckLossWarning("train/loss_share", steps=10)
    for share in [shares[0]] * 10 + [shares[1]] * 30:
        trainer = SimpleNamespace(callback_metrics={"train/loss_share": torch.tensor(share)})
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert capsys.readouterr().err.count("times ln B") == warnings


def test_a_run_without_the_metric_is_left_alone(capsys):
    StuckLossWarning("train/loss_share", steps=1).on_train_batch_end(
        SimpleNamespace(callback_metrics={}), None, None, None, 0
    )
    assert not capsys.readouterr().err
