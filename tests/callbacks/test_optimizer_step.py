import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from support.methods.tiny_modules import Student, loader, trainer
from vlightning.callbacks import OptimizerStepCallback


class Counter(OptimizerStepCallback):
    """Records the index of each batch after which it was called, and checks that the weights changed."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.before: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.before = torch.cat([weight.flatten() for weight in pl_module.student.parameters()]).detach().clone()

    def on_optimizer_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = torch.cat([weight.flatten() for weight in pl_module.student.parameters()]).detach().clone()
        assert not torch.equal(now, self.before)
        self.before = now
        self.batches.append(trainer.fit_loop.epoch_loop.batch_idx)


def fitted(module, batches, **kwargs):
    counter = Counter()
    run = trainer(counter, **kwargs)
    run.fit(module, loader(batches))
    return counter, run


def test_each_batch_is_a_step_without_accumulation():
    counter, run = fitted(Student(), 4)
    assert counter.batches == [0, 1, 2, 3]
    assert run.global_step == 4


def test_micro_batches_do_not_count():
    counter, run = fitted(Student(), 8, accumulate_grad_batches=3)
    assert counter.batches == [2, 5, 7]  # the last step takes the two that are left
    assert run.global_step == 3


class DropsGradients(Student):
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 1:
            for weight in self.student.parameters():
                weight.grad = None


def test_a_step_without_any_gradient_does_not_count():
    counter, run = fitted(DropsGradients(), 4)
    assert run.global_step == 4  # Lightning counts it
    assert counter.batches == [0, 2, 3]


class ReturnsNone(Student):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_batch_whose_training_step_returns_none_does_not_count():
    counter, _ = fitted(ReturnsNone(), 3)
    assert counter.batches == [0, 2]


class StepsEveryOther(Student):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


def test_a_module_that_does_not_call_its_optimizer_does_not_count():
    counter, run = fitted(StepsEveryOther(), 4)
    assert run.global_step == 4
    assert counter.batches == [1, 3]


class Overflows(Student):
    def __init__(self, optimizer_class, **kwargs):
        super().__init__(nn.Linear(4, 4))
        self.make = lambda weights: optimizer_class(weights, lr=0.1, **kwargs)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 2 else loss

    def configure_optimizers(self):
        return self.make(self.student.parameters())


@pytest.mark.parametrize(
    ("optimizer", "options"), [(torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True})], ids=["sgd", "fused adamw"]
)
def test_a_step_that_the_gradient_scaler_skips_does_not_count(optimizer, options):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    counter, run = fitted(
        Overflows(optimizer, **options), 5, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
    )
    assert scaler.get_scale() == 2.0**7  # it did skip one
    assert run.global_step == 5  # Lightning counts it
    assert counter.batches == [0, 1, 3, 4]


class StepsByHand(Student):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


def test_manual_optimization_counts_once_a_batch():
    counter, run = fitted(StepsByHand(), 3)
    assert counter.batches == [0, 2]
    assert run.global_step == 4


def test_resuming_and_a_second_fit_count_from_where_they_start(tmp_path):
    run = trainer(Counter(), max_epochs=-1, max_steps=3)
    module = Student()
    run.fit(module, loader(5))
    run.save_checkpoint(tmp_path / "three.ckpt")
    counter = Counter()
    again = trainer(counter, max_epochs=-1, max_steps=5)
    again.fit(module, loader(5), ckpt_path=tmp_path / "three.ckpt")
    assert counter.batches == [3, 4]
    again.fit_loop.epoch_loop.max_steps = 7
    again.fit(module, loader(5))
    assert len(counter.batches) == 4


def test_hooks_are_removed_from_the_optimizer_after_the_fit():
    _, run = fitted(Student(), 2)
    assert not run.optimizers[0]._optimizer_step_post_hooks
