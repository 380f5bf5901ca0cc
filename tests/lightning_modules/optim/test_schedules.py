"""The learning rates of an optimizer from the first step on, and runs of unknown length."""

import math

import pytest
import torch
from lightning import Callback
from torch import nn

from support.methods.methods import METHODS
from support.methods.tiny_modules import loader, trainer
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.lightning_modules.base.method import Method
from vlightning.lightning_modules.optim.optimizers import adamw
from vlightning.lightning_modules.optim.schedules import WarmupCosine

PEAK, DIM = 0.1, 4


class Scheduled(Method):
    """A network with a schedule."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule
        self.network = nn.Linear(DIM, DIM)

    def paper_optimizer(self, groups):
        return adamw(groups, PEAK, 0.0, (0.9, 0.98))

    def paper_schedule(self):
        return self.schedule

    def training_step(self, batch, batch_idx):
        return self.network(batch).square().mean()


class Rates(Callback):
    """Records the learning rate of each optimizer step."""

    def __init__(self):
        self.taken = []

    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_pre_hook(
            lambda optimizer, args, kwargs: self.taken.append(optimizer.param_groups[0]["lr"])
        )


def rates(module, steps):
    noted = Rates()
    trainer(noted).fit(module, loader(steps))
    return noted.taken


def cosine(steps):
    return [PEAK * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]


@pytest.mark.filterwarnings("ignore:warmup_steps is")
@pytest.mark.parametrize(
    ("schedule", "steps", "warmup"),
    [
        (WarmupCosine(PEAK, 2000), 30, [PEAK / 3, 2 * PEAK / 3, PEAK]),
        (WarmupCosine(PEAK, 2000), 5, []),
        (WarmupCosine(PEAK, 2), 5, [PEAK / 2, PEAK]),
        (WarmupCosine(PEAK, warmup_start=0.0, warmup_share=0.1), 5, []),
        (WarmupCosine(PEAK, warmup_start=0.0, warmup_share=0.1), 20, [0.0, PEAK / 2]),
    ],
)
def test_the_first_rates_follow_the_capped_warm_up(schedule, steps, warmup):
    assert rates(Scheduled(schedule), steps) == pytest.approx([*warmup, *cosine(steps - len(warmup))])


@pytest.mark.filterwarnings("ignore:warmup_steps is")
def test_a_resumed_run_continues_its_learning_rates(tmp_path):
    whole = rates(Scheduled(WarmupCosine(PEAK, 2000)), 30)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "two.ckpt")
                trainer.should_stop = True

    trainer(Stop()).fit(Scheduled(WarmupCosine(PEAK, 2000)), loader(30))
    again = Rates()
    trainer(again).fit(Scheduled(WarmupCosine(PEAK, 2000)), loader(30), ckpt_path=tmp_path / "two.ckpt")
    assert again.taken[0] == pytest.approx(whole[2])


@pytest.mark.parametrize("method", [method for method in METHODS if method != "cocord"])
def test_a_time_limit_alone_does_not_define_a_schedule(method, tmp_path):
    module, data = METHODS[method].build(METHODS[method].prepare(tmp_path), 0, batch_size=4, num_workers=0)
    before = {name: weight.clone() for name, weight in module.state_dict().items() if name.startswith("student.")}
    fitted = trainer(max_time={"minutes": 5}, max_epochs=None, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(UserError, match=r"neither max_epochs nor max_steps: set trainer\.max_steps or"):
        fitted.fit(module, data)
    assert fitted.global_step == 0
    for name, weight in module.state_dict().items():
        if name in before:  # of the words those are left that the tokenizer knows
            assert torch.equal(weight, before[name][: len(weight)] if weight.ndim else before[name])


def test_milestones_in_epochs_need_no_length(tmp_path):
    entry = METHODS["cocord"]
    module, data = entry.build(entry.prepare(tmp_path), 0, batch_size=8, num_workers=0)
    limits = {"limit_train_batches": 1, "limit_val_batches": 0, "default_root_dir": tmp_path}
    fitted = trainer(max_time={"seconds": 1}, max_epochs=None, **limits)
    fitted.fit(module, data)
    assert fitted.global_step > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.max_time", "00:00:05:00"], "set trainer.max_steps or trainer.max_epochs too"),
        (["--model.optim.learning_rate=0"], "Expected optim.learning_rate of more than 0 and at most 100, got 0"),
    ],
)
def test_the_command_line_names_the_setting(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"vision.patch_size": 8, "vision.width": 16, "vision.depth": 1, "vision.heads": 2, "text.width": 16}
    sizes |= {"text.heads": 2, "text.ffn_width": 32, "text.depth": 1, "text.fusion_depth": 1, "contrast.queue_size": 16}
    small = [f"--model.{name}={size}" for name, size in sizes.items()]
    data = ("--data", "ShapesDataModule", "--data.length", "8", "--data.batch_size", "4", "--data.num_workers", "0")
    more = ("--data.eval_length", "4", "--data.image_size", "16", "--trainer.accelerator", "cpu")
    ran = run("fit", "--model", "ALBEFModule", *small, *data, *more, *words)
    assert ran.status == 1
    assert said in ran.sentence
