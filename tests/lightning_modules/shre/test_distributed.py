"""SHRe on two processes: the gradient of the whole batch, and sharded as under DDP."""

import pytest
import torch

from support.methods.groups import merged
from support.methods.shre import WORDS, random_batch, ready, tiny_shre, write_self_supervised, write_teacher
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from vlightning.callbacks import OwnClassification, ZeroShotClassification, rank
from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule

ROWS = 8


def losses_and_gradients(index, world, options):
    module = ready(tiny_shre(**options))
    own = slice(index * ROWS // world, (index + 1) * ROWS // world)
    batch = random_batch(ROWS) | {"image_id": torch.tensor([0, 1, 2, 0, 0, 5, 2, 7])}  # of two processes too
    found = module.training_step({name: column[own] for name, column in batch.items()}, 0)
    loss = found["loss"] if isinstance(found, dict) else found
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def on_rank(*arguments):
    return losses_and_gradients(rank(), 2, *arguments)


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": {"micro_batch_size": 3, "loss_rows": 3}}, {"shared": "transformer"}],
    ids=["whole", "in slices", "transformer"],
)
def test_mean_of_two_halves_equals_the_whole_batch(tmp_path, options):
    taught = write_teacher(tmp_path)
    whole = {name: value for name, value in options.items() if name == "shared"}
    loss, gradients = losses_and_gradients(0, 1, taught | whole)
    halves = run_distributed(on_rank, taught | options)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    assert len(gradients) > 40
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_mean_of_two_halves_equals_the_whole_batch_with_a_memory_bank(tmp_path):
    options = merged(write_self_supervised(tmp_path), {"teacher": {"queue_size": 4}})
    loss, gradients = losses_and_gradients(0, 1, options)
    halves = run_distributed(on_rank, options)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-9, atol=1e-13, msg=name)


def trained(kind, options):
    data = ShapesDataModule(
        image_size=16, max_tokens=8, length=32, eval_length=8, batch_size=4, num_workers=0, seed=0, vocab_size=320
    )
    shapes = ShapeClassesDataModule(eval_length=43, image_size=16, batch_size=8, seed=0)
    callbacks = [OwnClassification(shapes), ZeroShotClassification(shapes, templates="simple")]
    module, trainer = tiny_shre(**WORDS, **options), rank_trainer(kind, max_epochs=2, callbacks=callbacks)
    trainer.fit(module, data)
    return whole_state(module), {name: float(value) for name, value in trainer.callback_metrics.items()}


def trained_on_rank(options):
    return [trained(kind, options) for kind in ("ddp", "sharded")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"shared": "transformer", "memory": {"micro_batch_size": 3}}], ids=["mlp", "transformer"]
)
def test_sharded_training_equals_ddp(tmp_path, options):
    options = write_teacher(tmp_path, classes=40) | {"optim": {"learning_rate": 1e-3}} | options
    (state, metrics), (sharded_state, sharded_metrics) = run_distributed(trained_on_rank, options)[0]
    assert state.keys() == sharded_state.keys()
    for name, value in state.items():
        torch.testing.assert_close(sharded_state[name], value, rtol=1e-4, atol=1e-4, msg=name)
    expected = {"val/h2/recall_mean", "val/h3/recall_mean", "val/supervised_teacher_top1", "val/zero_shot_top1"}
    assert expected <= metrics.keys()
    for name, value in metrics.items():
        assert sharded_metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
