"""A step with a non-finite loss or gradient has no effect in any process."""

import copy
import warnings

import pytest
import torch
from lightning import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from vlightning.callbacks import (
    EMACallback,
    EMAPair,
    FeatureQueue,
    QueueCallback,
    SkipNonFiniteSteps,
    rank,
    world_size,
)
from vlightning.callbacks.distributed.collectives import HostCopy
from vlightning.callbacks.non_finite import _extremes
from vlightning.common.errors import UserError

BATCHES, ROWS, DIM = 6, 4, 5


class Moco(LightningModule):
    """All parts of the state that change: weights, moments, statistics of BatchNorm, an average, a queue."""

    def __init__(self, fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.student = nn.Sequential(nn.Linear(DIM, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.queue = FeatureQueue(50, dim=3)

    def configure_model(self):
        if self.device_mesh is not None:
            for network in (self.student, self.teacher):
                fully_shard(network, mesh=self.device_mesh["data_parallel"])

    def momentum_pairs(self):
        return {"teacher": EMAPair("student", "teacher", momentum=0.9, buffers="keep")}

    def queues(self):
        return {"keys": self.queue}

    def training_step(self, batch, batch_idx):
        output = self.student(batch["x"])
        with torch.no_grad():
            keys = self.teacher(batch["target"])
        loss = F.mse_loss(output, keys + 1) + 0.01 * (output @ self.queue.features.T).square().mean()
        loss = loss + batch["added"].sum()
        if batch["root"]:  # adds zero, whose gradient is undefined
            loss = loss + (output.flatten()[0] * 0).abs().sqrt()
        return {"loss": loss, "keys": {"keys": keys}}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.student.parameters(), lr=0.05, fused=self.fused)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), "interval": "step"}]


def batches(bad=None, at=(3,), left_out=(), count=BATCHES):
    """Return this process's batches; some are non-finite in the last process only, or missing in all."""
    draws = torch.Generator().manual_seed(7 + rank())
    rows = []
    for number in range(count):
        batch = {"x": torch.randn(ROWS, DIM, generator=draws), "target": torch.randn(ROWS, DIM, generator=draws)}
        batch |= {"added": torch.zeros(1), "root": torch.zeros(1)}
        batch["sample_index"] = torch.arange(ROWS) + 100 * number + 10 * rank()
        if number in at and rank() == world_size() - 1:
            if bad == "image":
                batch["x"][1, 2] = torch.nan
            elif bad == "loss":
                batch["added"] += torch.inf
            elif bad == "gradient":
                batch["root"] += 1
        if number not in left_out:
            rows.append(batch)
    return DataLoader(rows, batch_size=None)


def everything(fitted):
    module = fitted.lightning_module
    optimizer = fitted.strategy.optimizer_state(fitted.optimizers[0])["state"]
    moments = {
        f"{number}/{name}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for number, state in optimizer.items()
        for name, value in state.items()
    }
    return whole_state(module) | moments


def callbacks(**options):
    return [EMACallback(), QueueCallback(), SkipNonFiniteSteps(**options)]


def run(make, module=None, options=None, **data):
    """State, steps and warnings of a run."""
    fitted = make(callbacks=callbacks(**(options or {})), max_epochs=1, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted.fit(module or Moco(), batches(**data))
    messages = [str(one.message) for one in told if "was skipped" in str(one.message)]
    skipped = next(one for one in fitted.callbacks if isinstance(one, SkipNonFiniteSteps)).skipped_steps
    ema = next(one for one in fitted.callbacks if isinstance(one, EMACallback)).updates["teacher"]
    return (
        everything(fitted),
        [fitted.global_step, fitted.lr_scheduler_configs[0].scheduler.last_epoch, skipped, ema],
        messages,
    )


def one_process(callbacks, **options):
    return trainer(*callbacks, **options)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert value.isfinite().all(), name


@pytest.mark.fault(
    "NaN or infinite loss or gradient",
    "NaN pixel; infinite loss; undefined gradient",
    "skipped, counted, named; as if the batch had not been there",
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", ["image", "loss", "gradient"])
def test_a_non_finite_batch_leaves_no_trace(bad, fused):
    state, counts, messages = run(one_process, Moco(fused), bad=bad)
    expected, _, _ = run(one_process, Moco(fused), left_out=(3,))
    assert_same(state, expected)
    assert counts == [BATCHES, BATCHES, 1, BATCHES - 1]  # step and schedule advanced, the average did not
    assert len(messages) == 1
    assert messages[0].startswith("Step 4 was skipped (1 of at most 10)")
    assert "300, 301, 302, 303" in messages[0]
    assert not run(one_process)[2]


def on_rank(kind, fused, **data):
    return run(lambda **options: rank_trainer(kind, **options), Moco(fused), **data)


@pytest.mark.parametrize("at", [0, BATCHES - 1])
def test_the_first_and_the_last_batch_are_skipped_by_a_fused_optimizer(at):
    state, counts, _ = run(one_process, Moco(fused=True), bad="image", at=(at,))
    expected, _, _ = run(one_process, Moco(fused=True), left_out=(at,))
    assert_same(state, expected)
    assert counts == [BATCHES, BATCHES, 1, BATCHES - 1]


@pytest.mark.parametrize("fused", [False, True])
def test_the_host_waits_after_the_step_of_a_fused_optimizer(fused, monkeypatch):
    module, order = Moco(fused), []
    value = HostCopy.value
    monkeypatch.setattr(HostCopy, "value", lambda asked: order.append("waits") or value(asked))

    class Steps(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.optimizers[0].register_step_post_hook(lambda *_: order.append("step"))

    one_process([Steps(), *callbacks()], max_epochs=1).fit(module, batches(count=2))
    assert order == (["step", "waits"] if fused else ["waits", "step"]) * 2
    assert not hasattr(module.optimizers().optimizer, "found_inf")


@pytest.mark.fault(
    "the same in one of two processes, DDP and sharded", "as above, in the last process", "all skip together"
)
@pytest.mark.parametrize(("kind", "fused"), [("ddp", False), ("ddp", True), ("sharded", False), ("sharded", True)])
@pytest.mark.parametrize("bad", ["image", "loss", "gradient"])
def test_all_processes_skip_a_step_that_is_non_finite_in_one(kind, fused, bad):
    found = run_distributed(on_rank, kind, fused, bad=bad)
    expected = run_distributed(on_rank, kind, fused, left_out=(3,))
    for (state, counts, _), (whole, _, _) in zip(found, expected, strict=True):
        assert_same(state, whole)
        assert counts == [BATCHES, BATCHES, 1, BATCHES - 1]
    assert "300, 301, 302, 303, 310, 311, 312, 313" in found[0][2][0]


@pytest.mark.fault(
    "the same in one of two accumulated batches",
    "as above, in the first or the second, with and without a gradient scaler",
    "as if both batches had not been there",
)
@pytest.mark.parametrize(
    ("bad", "scaled", "fused"),
    [
        ("image", False, False),
        ("loss", False, False),
        ("gradient", False, False),
        ("image", False, True),
        ("loss", False, True),
        ("gradient", False, True),
        ("image", True, False),
        ("loss", True, False),
    ],
)
@pytest.mark.parametrize("at", [2, 3])
def test_accumulated_batches_are_skipped_together(at, bad, scaled, fused):
    def make(**options):
        # The scale is halved where gradients are infinite; with one that is no power of two, all of it would round.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        plugins = [MixedPrecision("16-mixed", device="cpu", scaler=scaler)] if scaled else []
        return one_process(**options, plugins=plugins, accumulate_grad_batches=2)

    state, counts, messages = run(make, Moco(fused), bad=bad, at=(at,))
    expected, _, _ = run(make, Moco(fused), left_out=(2, 3))
    assert_same(state, expected)
    assert int(state["queue.filled"]) == 4 * ROWS
    assert counts == [BATCHES // 2, BATCHES // 2, 1, BATCHES // 2 - 1]
    assert "200, 201, 202, 203, 300, 301, 302, 303" in messages[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("bad", "skipped"), [("loss", 1), ("image", 1), ("gradient", 0)])
def test_a_gradient_scaler_skips_gradients_by_itself(bad, skipped, fused):
    """The scaler searches for its scale; a non-finite loss is skipped by the callback."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def make(**options):
        plugins = [MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
        return one_process(**options, plugins=plugins)

    state, counts, _ = run(make, Moco(fused), bad=bad)
    assert all(value.isfinite().all() for value in state.values())
    assert counts[2:] == [skipped, BATCHES - 1]
    assert scaler.get_scale() == (2.0**8 if bad == "loss" and not fused else 2.0**7)


@pytest.mark.fault(
    "undefined gradients in every step, with a gradient scaler",
    "a loss whose gradient is NaN",
    "once the scale is down to 1 they count, and the run ends",
)
@pytest.mark.parametrize("fused", [False, True])
def test_skips_of_a_gradient_scaler_count_at_scale_one(tmp_path, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3)
    plugins = [MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
    fitted = trainer(SkipNonFiniteSteps(2), QueueCallback(), plugins=plugins, default_root_dir=tmp_path, max_epochs=9)
    start = Moco(fused).state_dict()
    with pytest.raises(UserError, match=r"Expected at most max_skipped=2 steps with .*, got 3"):
        fitted.fit(Moco(fused), batches("gradient", at=range(BATCHES)))
    assert fitted.global_step == 3 + 3  # the scales 8, 4 and 2, then three that count
    kept = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(kept[name], value) for name, value in start.items() if name.endswith(("weight", "bias")))


@pytest.mark.fault(
    "too many bad steps", "as many infinite losses", "the run ends; a checkpoint with the weights of before"
)
def test_beyond_the_limit_the_run_ends_with_the_last_finite_weights(tmp_path):
    skip = SkipNonFiniteSteps(max_skipped=1)
    fitted = trainer(EMACallback(), QueueCallback(), skip, default_root_dir=tmp_path, max_epochs=3)
    with pytest.raises(UserError, match=r"Expected at most max_skipped=1 steps with .*, got 2.*last\.ckpt"):
        fitted.fit(Moco(), batches("loss"))
    checkpoint = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    expected = Moco()
    reference = trainer(EMACallback(), QueueCallback(), max_epochs=3, max_steps=BATCHES - 1 + 3)
    reference.fit(expected, batches(left_out=(3,)))
    assert_same(checkpoint["state_dict"], expected.state_dict())
    assert checkpoint["callbacks"]["SkipNonFiniteSteps"] == {"skipped_steps": 2}
    # The resumed run continues the count.
    with pytest.raises(UserError, match=r"Expected at most max_skipped=1 steps .*, got 3"):
        trainer(EMACallback(), QueueCallback(), SkipNonFiniteSteps(1), default_root_dir=tmp_path, max_epochs=4).fit(
            Moco(), batches("loss"), ckpt_path=tmp_path / "checkpoints/last.ckpt", weights_only=True
        )


def test_a_negative_limit_is_refused():
    with pytest.raises(UserError, match="got -1"):
        SkipNonFiniteSteps(-1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_found_at_any_position_and_large_values_pass(value):
    good = torch.full((1000,), 3e38)  # whose square is infinite
    good[::2] *= -1
    assert _extremes([good, torch.zeros(1)]).isfinite().all()
    for place in (0, 1, 7, 8, 333, 998, 999):
        bad = good.clone()
        bad[place] = value
        assert not _extremes([good, bad]).isfinite().all()
