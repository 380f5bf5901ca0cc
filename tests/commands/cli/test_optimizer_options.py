"""Typed optimizer settings survive the restore of the optimizer; its moments and its schedule do too."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from support.methods.tiny import TinyData, TinyModel
from vlightning.commands.cli.checkpoints import TypedOptimizerOptions


class Scheduled(TinyModel):
    """AdamW under a schedule that halves the rate at every step."""

    def __init__(self, learning_rate: float, weight_decay: float) -> None:
        super().__init__(learning_rate=learning_rate)
        self.weight_decay = weight_decay
        self.rates: list[float] = []

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def fit(module: Scheduled, epochs: int, checkpoint: Path | None = None, **options: object) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=epochs, enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, TinyData(), ckpt_path=checkpoint)
    return trainer


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    trainer = fit(Scheduled(0.1, 0.0), epochs=1)
    trainer.save_checkpoint(tmp_path / "two_steps.ckpt")
    return tmp_path / "two_steps.ckpt"


def test_lightning_alone_restores_the_old_settings(checkpoint: Path):
    module = Scheduled(0.4, 0.2)
    trainer = fit(module, 2, checkpoint)
    assert module.rates == pytest.approx([0.1 / 4, 0.1 / 8])
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.0


def test_typed_settings_override_and_the_schedule_continues(checkpoint: Path):
    module = Scheduled(0.4, 0.2)
    trainer = fit(module, 2, checkpoint, callbacks=[TypedOptimizerOptions()])
    assert module.rates == pytest.approx([0.4 / 4, 0.4 / 8])
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.2
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {4}  # the moments were kept: two steps before, two after


def test_equal_settings_change_nothing(checkpoint: Path):
    weights = []
    for callbacks in ([], [TypedOptimizerOptions()]):
        module = Scheduled(0.1, 0.0)
        fit(module, 2, checkpoint, callbacks=callbacks)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)
