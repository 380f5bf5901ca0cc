"""Every method on the GPU, or on the CPU where there is none: `pytest -m gpu`.

The numbers of a CPU, which other tests compare with the authors' code, are the reference of those of a GPU.
"""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from support.devices.devices import whole_float32  # noqa: F401, a fixture
from support.methods import random_batches
from support.methods.tiny_modules import SaveSecond, trainer
from support.runs.distributed import whole_state
from vlightning.callbacks import CompileCallback, ShardedStrategy, SkipNonFiniteSteps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, STEPS = 8, 4
EXACT = {"albef": {"text": {"dropout": 0.0}, "mlm": False}, "shre": {"text": {"dropout": 0.0}}}
"""Without draws, which differ between devices."""
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("whole_float32")]


class Losses(Callback):
    """Keeps the losses."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, runs, module, outputs, *_):
        self.losses.append(outputs["loss"].detach().float().cpu())


def fit(name, folder, *callbacks, device=DEVICE, changes=None, resumed=None, **options):
    """Train on one batch; return the losses and the whole state on the CPU."""
    if name in ("mmlg", "mobileclip"):
        pytest.importorskip("open_clip")
    module = random_batches.small(name, folder, **EXACT.get(name, {}) | (changes or {}))
    losses = Losses()
    options = {"accelerator": device, "max_steps": STEPS, "max_epochs": -1, "default_root_dir": folder} | options
    runs = trainer(losses, *callbacks, **options)
    torch.manual_seed(0)
    runs.fit(module, random_batches.rows_loader(name, ROWS, ROWS), ckpt_path=resumed)
    assert runs.global_step == STEPS
    return torch.stack(losses.losses), {key: value.cpu() for key, value in whole_state(module).items()}


@pytest.mark.parametrize("name", random_batches.NAMES)
def test_losses_are_those_of_a_cpu(name, tmp_path):
    first = fit(name, tmp_path)[0][0]
    expected = fit(name, tmp_path, device="cpu")[0][0]
    tolerance = 0.05 if name == "albef" else 1e-4  # ALBEF draws negatives, on each device in another way
    torch.testing.assert_close(first, expected, rtol=tolerance, atol=1e-4)
    low = fit(name, tmp_path, precision="bf16-mixed")[0][0]
    torch.testing.assert_close(low, expected, rtol=0.1 if name == "albef" else 0.03, atol=0.03)


@pytest.mark.parametrize("name", random_batches.NAMES)
def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(name, tmp_path):
    options = {"deterministic": "warn", "precision": "bf16-mixed"}
    saving = SaveSecond(tmp_path / "second.ckpt")
    _, whole = fit(name, tmp_path, saving, **options)
    _, resumed = fit(name, tmp_path, saving, resumed=saving.path, **options)
    different = [key for key, value in whole.items() if not torch.equal(value, resumed[key])]
    assert not different


class NaNInGradient(Callback):
    """Sets a gradient of the second step to NaN."""

    def on_after_backward(self, runs, module):
        if runs.global_step == 1:
            next(weight.grad for weight in module.parameters() if weight.grad is not None).fill_(torch.nan)


@pytest.mark.parametrize("name", random_batches.NAMES)
def test_a_step_with_a_non_finite_gradient_is_skipped(name, tmp_path):
    skipping = SkipNonFiniteSteps()
    _, state = fit(name, tmp_path, NaNInGradient(), skipping, precision="bf16-mixed")
    assert skipping.skipped_steps == 1
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())


def test_fp16_scales_the_loss_and_skips_a_step_with_infinite_gradients(tmp_path):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, growth_interval=1000)
    scaling = MixedPrecision("16-mixed", DEVICE, scaler)
    _, state = fit("mobileclip", tmp_path, SkipNonFiniteSteps(), plugins=[scaling])
    assert scaler.get_scale() < 2.0**40
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
    _, plain = fit("mobileclip", tmp_path, SkipNonFiniteSteps())
    assert any(not torch.equal(value, plain[key]) for key, value in state.items())


@pytest.mark.skipif(DEVICE == "cpu", reason="tests/guarantees/faults/test_compile.py compiles on a CPU")
@pytest.mark.parametrize("name", random_batches.NAMES)
def test_a_compiled_step_equals_an_eager_one(name, tmp_path):
    eager = fit(name, tmp_path, precision="bf16-mixed")[0][0]
    torch._dynamo.reset()
    compiled = fit(name, tmp_path, CompileCallback(), precision="bf16-mixed")[0][0]
    torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.parametrize("name", ["albef", "shre"])
def test_one_process_of_a_strategy_equals_a_run_without_it(name, kind, tmp_path):
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    strategies = {"ddp": DDPStrategy, "sharded": ShardedStrategy}
    strategy = strategies[kind](process_group_backend=backend)
    try:
        found = fit(name, tmp_path, strategy=strategy, use_distributed_sampler=False)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    losses, state = fit(name, tmp_path)
    torch.testing.assert_close(found[0][0], losses[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == state.keys()
    assert all(torch.isfinite(loss) for loss in found[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="torch has SyncBatchNorm for GPUs only")
def test_synchronized_batch_norm_of_one_process_equals_batch_norm(tmp_path):
    strategy = DDPStrategy(process_group_backend="nccl")
    found, _ = fit("cocord", tmp_path, strategy=strategy, sync_batchnorm=True, use_distributed_sampler=False)
    torch.distributed.destroy_process_group()
    expected, _ = fit("cocord", tmp_path)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
