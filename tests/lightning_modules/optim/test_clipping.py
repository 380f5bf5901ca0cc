"""Gradients are clipped under mixed precision, with and without a loss scale, although the optimizer is fused."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F

from support.methods.methods import METHODS, OTHERS
from support.methods.tiny_modules import loader, trainer
from vlightning.lightning_modules.base.method import Method
from vlightning.lightning_modules.optim.optimizers import adamw
from vlightning.lightning_modules.optim.schedules import WarmupCosine

CLIP, STEPS, DIM = 0.05, 8, 6


def plugin(precision, scale=2.0**10):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler)


class Regression(Method):
    """A network on random vectors, with the optimizer of the methods."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))

    def paper_optimizer(self, groups):
        return adamw(groups, 0.1, 0.1, (0.9, 0.98))

    def paper_schedule(self):
        return WarmupCosine(0.1, 0)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.network(batch).float(), 3 * batch.flip(1))


def slowly(precision, scale, algorithm, accumulate):
    """Float32 gradients, unscaled, clipped number by number, and torch's plainest AdamW; also the steps left out."""
    module, left_out = Regression(), 0
    optimizer = torch.optim.AdamW(
        module.parameter_groups(), lr=0.1, betas=(0.9, 0.98), weight_decay=0.1, fused=False, foreach=False
    )
    batches = list(loader(STEPS * accumulate, dim=DIM))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = module.paper_schedule().rate(step, STEPS)
        optimizer.zero_grad()
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}[precision]):
                loss = module.training_step(batch, 0) / accumulate
            (loss * scale).backward()
        gradients = [weight.grad for weight in module.parameters()]
        if not all(gradient.isfinite().all() for gradient in gradients):
            left_out, scale = left_out + 1, scale / 2
            continue
        for gradient in gradients:
            gradient /= scale
        if algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-CLIP, CLIP)
        else:
            norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
            assert norm > CLIP
            for gradient in gradients:
                gradient *= CLIP / (norm + 1e-6)
        optimizer.step()
    return module.state_dict(), left_out


@pytest.mark.parametrize(
    ("precision", "scale", "algorithm", "accumulate"),
    [
        ("16-mixed", 2.0**10, "norm", 1),
        ("16-mixed", 2.0**10, "value", 2),
        ("16-mixed", 2.0**20, "norm", 1),  # overflows at first
        ("bf16-mixed", 1.0, "norm", 1),
    ],
)
def test_training_with_clipped_gradients_equals_unscaling_clipping_and_plain_adamw(
    precision, scale, algorithm, accumulate
):
    expected, left_out = slowly(precision, scale, algorithm, accumulate)
    assert (left_out > 0) == (scale == 2.0**20)
    assert left_out < STEPS - 2
    module = Regression()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    options = {"gradient_clip_val": CLIP, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": accumulate}
    fitted = trainer(plugins=[plugin(precision, scale)], **options)
    fitted.fit(module, loader(STEPS * accumulate, dim=DIM))
    assert fitted.optimizers[0].param_groups[0]["fused"]
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(weight, before[name])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("method", METHODS | {name: OTHERS[name] for name in ("classifier", "captioning")})
def test_every_optimizer_steps_with_gradients_of_the_clipped_norm(method, precision, tmp_path):
    entry = (METHODS | OTHERS)[method]
    module, data = entry.build(entry.prepare(tmp_path), 0, batch_size=4, num_workers=0)
    norms = []

    def listen(optimizer, args, kwargs):
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    clipped = 1e-3
    fitted = trainer(
        plugins=[plugin(precision, scale=4.0)],
        gradient_clip_val=clipped,
        max_steps=2,
        max_epochs=-1,
        limit_val_batches=0,
        default_root_dir=tmp_path,
    )
    configure = module.configure_optimizers

    def configure_and_listen():
        configured = configure()
        configured["optimizer"].register_step_post_hook(listen)
        return configured

    module.configure_optimizers = configure_and_listen
    fitted.fit(module, data)
    assert len(norms) == 2
    assert norms == pytest.approx([clipped, clipped], rel=1e-3)
