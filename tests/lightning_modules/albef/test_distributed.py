"""Two processes with half the batch each compute what one computes with the whole batch."""

import pytest
import torch

from support.methods.albef import IMAGE_SIZE, MAX_TOKENS, SIZES, random_batch, tiny_albef
from support.runs.distributed import run_ddp_fit, run_distributed
from vlightning.callbacks import rank, world_size
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules.albef import itm, mlm
from vlightning.lightning_modules.albef import module as step

PAIRS, LENGTH = 8, 6


def _global_draws():
    """Masks with different counts in the two halves, and negatives that stay inside each half."""
    ids = random_batch(PAIRS, dtype=torch.float64)["input_ids"]
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    chosen[0, 1], chosen[1, 1], chosen[1, 2], chosen[2, 2], chosen[6, 1] = (True,) * 5
    half = PAIRS // 2
    image = torch.tensor([1, 2, 3, 0, 5, 6, 7, 4])
    text = torch.tensor([2, 3, 0, 1, 7, 4, 5, 6])
    assert all((image[:half] < half) & (text[:half] < half))
    return ids, chosen, image, text


def _losses_and_gradients(index, world):
    module = tiny_albef(text={"dropout": 0.0}).double().train()
    generator = torch.Generator().manual_seed(5)
    for queue in module.queues().values():
        features = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        queue.enqueue(torch.nn.functional.normalize(features, dim=-1), queue.fitting_ids(torch.arange(2, 8)))
    for parameter in module.teacher.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    own = slice(index * PAIRS // world, (index + 1) * PAIRS // world)
    batch = {name: column[own] for name, column in random_batch(PAIRS, dtype=torch.float64).items()}
    ids, chosen, image, text = _global_draws()
    masked = torch.where(chosen, 103, ids)
    drawn = iter([image[own] - own.start, text[own] - own.start])
    step.draw_masked_tokens = lambda *_: mlm.select_positions(
        ids[own], masked[own], chosen[own], int(chosen[own].sum())
    )
    itm.draw_hard_negatives = lambda *_: itm.Negatives(i := next(drawn), torch.ones_like(i, dtype=torch.bool))
    module.current_alpha = lambda: 0.4
    logged = {}
    module.log_dict = lambda values, **_: logged.update(values)
    outputs = module.training_step(batch, 0)
    outputs["loss"].backward()
    values = {name: value for name, value in logged.items() if name.startswith("train/loss")}
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return values, gradients


@pytest.fixture
def restore_draws(monkeypatch):
    monkeypatch.setattr(step, "draw_masked_tokens", step.draw_masked_tokens)
    monkeypatch.setattr(itm, "draw_hard_negatives", itm.draw_hard_negatives)


def _in_child():
    return _losses_and_gradients(rank(), world_size())


def test_losses_and_gradients_of_two_processes_equal_one(restore_draws):
    losses, gradients = _losses_and_gradients(0, 1)
    ranks = run_distributed(_in_child)
    assert set(losses) == {"train/loss_itc", "train/loss_itm", "train/loss_mlm"}
    for name, value in losses.items():
        mean = (ranks[0][0][name] + ranks[1][0][name]) / 2  # what DDP's averaging of the gradients amounts to
        torch.testing.assert_close(mean, value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert ranks[0][0][name] != ranks[1][0][name]
    for name, gradient in gradients.items():
        mean = (ranks[0][1][name] + ranks[1][1][name]) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def _module_and_data():
    data = ShapesDataModule(
        length=32,
        eval_length=7,
        batch_size=4,
        num_workers=0,
        image_size=IMAGE_SIZE,
        vocab_size=200,
        max_tokens=MAX_TOKENS,
    )
    return tiny_albef(text={"vocab_size": 200}), data


def test_two_processes_train_with_every_parameter_in_use_and_stay_equal():
    first, second = run_ddp_fit(_module_and_data, {"max_epochs": 2})
    assert first["global_step"] == 8
    for name, value in first["state_dict"].items():
        assert torch.equal(value, second["state_dict"][name]), name
    assert int(first["state_dict"]["image_queue.filled"]) == SIZES["contrast"]["queue_size"]
    start = tiny_albef(text={"vocab_size": 200}).state_dict()
    assert not torch.equal(start["student.vision_proj.weight"], first["state_dict"]["student.vision_proj.weight"])
    recalls = {name: value for name, value in first["metrics"].items() if name.startswith("val/")}
    assert len(recalls) == 7
    assert recalls == {name: second["metrics"][name] for name in recalls}
