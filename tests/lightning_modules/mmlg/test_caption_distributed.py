"""Captioning on two processes: the gradient of the whole batch, the scores of the whole split, and sharded training."""

import pytest
import torch

from support.methods.captioning import EMBED_DIM, caption_data, caption_module, write_data
from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_ddp_fit, run_distributed, run_sharded_fit
from vlightning.callbacks import rank

ROWS = 6


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("captions") / "data", steps=60)


def losses_and_gradients(index, world, arguments):
    module = caption_module(arguments)
    module.load()
    module.log = lambda *_, **__: None
    module = module.double()
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(8) < torch.tensor([8, 7, 8, 1, 2, 1])[:, None]).long()  # 23 tokens in one half, 4 in the other
    batch = {
        "embedding": torch.randn(ROWS, EMBED_DIM, generator=generator, dtype=torch.float64),
        "input_ids": torch.randint(300, (ROWS, 8), generator=generator),
        "attention_mask": mask,
    }
    own = slice(index * ROWS // world, (index + 1) * ROWS // world)
    loss = module.training_step({name: values[own] for name, values in batch.items()}, 0)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def on_rank(arguments):
    return losses_and_gradients(rank(), 2, arguments)


def test_mean_of_two_halves_equals_the_whole_with_captions_of_different_length(arguments):
    loss, gradients = losses_and_gradients(0, 1, arguments)
    halves = run_distributed(on_rank, arguments)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    assert len(gradients) > 20
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-13, msg=name)


def evaluated(make, arguments):
    ran = make()
    (scores,) = ran.test(caption_module(arguments, seed=3), caption_data(arguments), verbose=False)
    return scores


def evaluated_on_rank(arguments):
    return evaluated(lambda: rank_trainer("ddp"), arguments)


def test_scores_of_two_processes_equal_one_process(arguments):
    one = evaluated(trainer, arguments)
    assert one["test/bleu_1"] > 0
    for two in run_distributed(evaluated_on_rank, arguments):
        assert two == pytest.approx(one, rel=1e-6)


def fits(arguments):
    return caption_module(arguments), caption_data(arguments, batch_size=3)


def test_sharded_training_equals_ddp(arguments):
    found = {}
    for kind, run_fit in (("ddp", run_ddp_fit), ("sharded", run_sharded_fit)):
        found[kind] = run_fit(fits, {"max_epochs": 2}, make_args=(arguments,))[0]
    whole, sharded = found["ddp"], found["sharded"]
    assert whole["state_dict"].keys() == sharded["state_dict"].keys()
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(sharded["state_dict"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    for name, value in whole["metrics"].items():
        assert sharded["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert "val/cider_d" in whole["metrics"]
