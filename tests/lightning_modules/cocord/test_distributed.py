"""CoCoRD on two processes: one dictionary, the averages in step, and the gradient of the whole batch."""

import torch

from support.methods.cocord import HEADS, random_batch, teacher_file, tiny_cocord
from support.runs.distributed import run_ddp_fit, run_distributed
from vlightning.callbacks import draws, rank
from vlightning.datamodules import ShapeClassesDataModule
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.cocord.crd import CRD

ROWS = 8


def frozen_statistics(module):
    """BatchNorm in eval mode, since its statistics would be those of each process's own half."""
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.eval()
    return module


def losses_and_gradients(index, world, folder):
    module = frozen_statistics(tiny_cocord(folder, kd={"weight": 0.5}).double())
    generator = torch.Generator().manual_seed(5)
    features = torch.nn.functional.normalize(torch.randn(6, 16, generator=generator, dtype=torch.float64), dim=1)
    module.dictionary.enqueue(features, torch.arange(6))
    own = slice(index * ROWS // world, (index + 1) * ROWS // world)
    batch = {name: column[own] for name, column in random_batch(ROWS, dtype=torch.float64, image_size=16).items()}
    module.log = module.log_dict = lambda *_, **__: None
    loss = module.training_step(batch, 0)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def banks_after_a_batch(index, world):
    """CRD's loss and state with its own negatives, which are drawn by position in the global batch."""
    torch.manual_seed(0)
    loss = CRD(6, 5, negatives=4)
    torch.manual_seed(index)
    loss.start([row % 3 for row in range(12)])
    draws.begin_step(3)
    generator = torch.Generator().manual_seed(5)
    images, student, teacher = torch.arange(8), *(torch.randn(8, width, generator=generator) for width in (6, 5))
    own = slice(index * 8 // world, (index + 1) * 8 // world)
    result = loss(student[own], teacher[own], images[own], images[own] % 3)
    loss.update()
    draws.begin_step(None)
    return result.detach(), {name: value.clone() for name, value in loss.named_buffers()}


def on_rank(folder):
    own = folder / str(rank())  # for its own file of the teacher
    own.mkdir()
    return *losses_and_gradients(rank(), 2, own), *banks_after_a_batch(rank(), 2)


def test_mean_of_two_halves_equals_the_whole_batch(tmp_path):
    loss, gradients = losses_and_gradients(0, 1, tmp_path)
    halves = run_distributed(on_rank, tmp_path)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-12)
    # CRD: equal banks, with the rows of both processes.
    loss, buffers = banks_after_a_batch(0, 1)
    torch.testing.assert_close(sum(half[2] for half in halves) / 2, loss, rtol=1e-5, atol=0)
    for name, buffer in buffers.items():
        assert torch.equal(halves[0][3][name], halves[1][3][name]), name
        torch.testing.assert_close(halves[0][3][name], buffer, rtol=1e-5, atol=1e-6)


def module_and_data(weights):
    torch.manual_seed(rank())
    teacher = {"name": "resnet14", "weights": weights}
    module = CoCoRDModule("resnet8", 40, teacher=teacher, contrast={"queue_size": 40}, **HEADS)
    return module, ShapeClassesDataModule(length=48, eval_length=10, batch_size=4, image_size=16, seed=0)


def test_dictionary_and_averages_are_the_same_in_every_process(tmp_path):
    # Processes start from different weights, which DDP synchronises.
    first, second = run_ddp_fit(module_and_data, {"max_epochs": 2}, make_args=(teacher_file(tmp_path, classes=40),))
    state = first["state_dict"]
    assert int(state["dictionary.filled"]) == 40
    assert int(state["dictionary.pointer"]) == (12 * 4 * 2) % 40
    assert len(set(state["dictionary.ids"].tolist())) > 10
    for name, value in state.items():
        # Statistics of BatchNorm are each process's own between two broadcasts.
        if "running" not in name:
            assert torch.equal(value, second["state_dict"][name]), name
    assert first["metrics"]["val/top1"] == second["metrics"]["val/top1"]
