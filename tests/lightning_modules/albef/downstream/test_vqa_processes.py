"""VQA on two processes: the loss and gradients of one process with twice the batch, and each question answered once.

Three questions share an image in training.
"""

import pytest
import torch
from lightning.pytorch import Callback

from support.methods.methods import OTHERS
from support.runs.distributed import rank_trainer, run_distributed


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.values.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))


def fit(kind, rows):
    """Loss of each of four steps, trained weights, accuracy, and the rows that were answered."""
    torch.set_default_dtype(torch.float64)
    changes = {"text": {"dropout": 0.0}}  # whose draws differ by rank
    sizes = {"batch_size": rows, "eval_batch_size": 3, "questions_per_image": 3}
    module, data = OTHERS["albef_vqa"].build(None, seed=0, changes=changes, num_workers=0, **sizes)
    module.double()
    losses = Losses()
    trainer = rank_trainer(kind, {}, callbacks=[losses], max_steps=4, max_epochs=-1, precision="64-true")
    trainer.fit(module, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return losses.values, state, metrics, module.evaluation.result.sample_index.tolist()


@pytest.mark.slow
def test_two_processes_train_and_answer_as_one():
    (whole,) = run_distributed(fit, "ddp", 8, processes=1)
    first, _ = run_distributed(fit, "ddp", 4)
    assert first[0] == pytest.approx(whole[0], rel=1e-9)
    for name, value in whole[1].items():
        torch.testing.assert_close(first[1][name], value, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    assert first[2] == pytest.approx(whole[2])
    assert sorted(first[3]) == sorted(whole[3]) == list(range(40))
