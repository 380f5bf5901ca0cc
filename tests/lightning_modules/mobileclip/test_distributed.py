"""Reinforced training on two processes: the gradient of the whole batch, and sharded as under DDP."""

import pytest
import torch

from support.methods.clip import add_tiny_clip, reinforced_batch, tiny_module
from support.runs.distributed import run_both_fits, run_distributed
from vlightning.callbacks import rank
from vlightning.datamodules import ReinforcedShapesDataModule
from vlightning.lightning_modules import MobileCLIPModule

ROWS = 8


def losses_and_gradients(index, world, options):
    module = tiny_module(distillation_weight=0.7, **options).double()
    own = slice(index * ROWS // world, (index + 1) * ROWS // world)
    loss = module.training_step({name: column[own] for name, column in reinforced_batch(ROWS).items()}, 0)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def on_rank(options):
    return losses_and_gradients(rank(), 2, options)


@pytest.mark.parametrize(
    "options", [{}, {"memory": {"micro_batch_size": 3, "loss_rows": 3}}], ids=["whole", "in slices"]
)
def test_mean_over_two_processes_equals_the_whole_batch(options):
    loss, gradients = losses_and_gradients(0, 1, {})
    halves = run_distributed(on_rank, options)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-13, msg=name)


def fits(folder, model, size):
    torch.manual_seed(0)
    module = MobileCLIPModule(
        model or add_tiny_clip(),
        max_tokens=16,
        vision={"image_size": size},
        teacher={"dims": [64, 96], "scales": [30.0, 30.0]},
        momentum={"momentum": 0.5},
        optim={"warmup_steps": 2},
    )
    data = ReinforcedShapesDataModule(
        folder, length=32, eval_length=8, augmentations=2, image_size=size, batch_size=4, num_workers=0, seed=0
    )
    return module, data


@pytest.mark.parametrize(
    ("model", "size", "tolerance"),
    # In MCi there are biases before norms, whose gradients are rounding errors, and AdamW makes steps of those.
    [(None, 16, 1e-4), pytest.param("MobileCLIP-tiny", 32, None, marks=pytest.mark.slow)],
    ids=["ViT", "MCi"],
)
def test_sharded_training_equals_ddp(tmp_path, model, size, tolerance):
    arguments = (str(tmp_path), model, size)
    fits(*arguments)[1].prepare_data()
    found = run_both_fits(fits, {kind: {"max_epochs": 1} for kind in ("ddp", "sharded")}, make_args=arguments)
    whole, sharded = found["ddp"], found["sharded"]
    assert whole["state_dict"].keys() == sharded["state_dict"].keys()
    assert any(name.startswith("average.") for name in whole["state_dict"])
    for name, value in whole["state_dict"].items():
        if tolerance is not None:
            torch.testing.assert_close(sharded["state_dict"][name], value, rtol=tolerance, atol=tolerance)
    for name, value in whole["metrics"].items():
        if tolerance is None and name.startswith("val/"):
            continue  # ranks among eight images
        assert sharded["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
