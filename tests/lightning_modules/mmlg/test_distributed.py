"""Extraction on two processes: the gradient of the whole batch, and sharded as under DDP."""

import pytest
import torch

from support.methods.clip import LENGTH, SIZE, reinforced_batch
from support.methods.mmlg import ready, tiny_extraction, write_teacher
from support.runs.distributed import run_both_fits, run_distributed
from vlightning.callbacks import LearngeneWriter, rank
from vlightning.callbacks.learngene.file import load_learngene
from vlightning.datamodules import ShapesDataModule

ROWS = 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def losses_and_gradients(index, world, teacher, options):
    module = ready(tiny_extraction(teacher, **options))
    own = slice(index * ROWS // world, (index + 1) * ROWS // world)
    columns = reinforced_batch(ROWS)
    loss = module.training_step({name: columns[name][own] for name in ("image", "input_ids")}, 0)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def on_rank(*arguments):
    return losses_and_gradients(rank(), 2, *arguments)


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3, "loss_rows": 3}], ids=["whole", "in slices"])
def test_mean_of_two_halves_equals_the_whole_batch(teacher, options):
    loss, gradients = losses_and_gradients(0, 1, teacher, {})
    halves = run_distributed(on_rank, teacher, options)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    assert len(gradients) > 50
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-13, msg=name)


def fits(teacher, options):
    sizes = {"image_size": SIZE, "max_tokens": LENGTH}
    data = ShapesDataModule(
        tokenizer="clip", vocab_size=49408, length=32, eval_length=8, batch_size=4, num_workers=0, seed=0, **sizes
    )
    return tiny_extraction(teacher, **options), data


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"micro_batch_size": 3}, marks=pytest.mark.slow),
        {"student": "plain"},
        pytest.param({"student": "TLEG"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "MM-LG",
)
def test_sharded_training_equals_ddp_and_writes_the_same_file(tmp_path, teacher, options):
    of_trainer = {
        kind: {"max_epochs": 1, "callbacks": [LearngeneWriter(str(tmp_path / kind))]} for kind in ("ddp", "sharded")
    }
    found = run_both_fits(fits, of_trainer, make_args=(teacher, options))
    whole, sharded = found["ddp"], found["sharded"]
    assert whole["state_dict"].keys() == sharded["state_dict"].keys()
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(sharded["state_dict"][name], value, rtol=1e-4, atol=1e-4, msg=name)
    for name, value in whole["metrics"].items():
        assert sharded["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    files = [load_learngene(tmp_path / kind) for kind in ("ddp", "sharded")]
    for name, tensor in files[0].tensors.items():
        torch.testing.assert_close(files[1].tensors[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
        if options.get("student") != "plain":  # whose file has other names
            torch.testing.assert_close(tensor, whole["state_dict"][f"student.{name}"])
    assert [file.step for file in files] == [4, 4]
