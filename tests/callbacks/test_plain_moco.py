import copy
import inspect

import torch
from lightning.pytorch import Callback

from support.methods import plain_moco
from support.methods.plain_moco import PlainMoCo
from support.methods.tiny_modules import loader, slow_average, trainer
from vlightning.callbacks import EMACallback, QueueCallback


class Watch(Callback):
    """Records the initial state, and after every batch the student's weights and the keys."""

    def __init__(self):
        self.students, self.keys, self.losses = [], [], []

    def on_fit_start(self, trainer, pl_module):
        self.start = copy.deepcopy(dict(pl_module.teacher.named_parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.students.append(copy.deepcopy(dict(pl_module.student.named_parameters())))
        self.keys.append(outputs["keys"]["vectors"].clone())
        self.losses.append(outputs["loss"].item())


def test_plain_moco_trains_with_a_teacher_and_a_queue():
    torch.manual_seed(0)
    watch, module = Watch(), PlainMoCo()
    run = trainer(watch, max_epochs=12)
    run.fit(module, loader(10, batch_size=12, dim=16))
    assert sum(isinstance(callback, EMACallback | QueueCallback) for callback in run.callbacks) == 2

    # The student learns to distinguish a vector from those in the queue, which is full from the second epoch on.
    assert sum(watch.losses[-10:]) < 0.85 * sum(watch.losses[10:20])

    with torch.no_grad():
        expected = slow_average(watch.start, watch.students, [0.9] * 120)
    for name, average in module.teacher.named_parameters():
        torch.testing.assert_close(average, expected[name].detach(), rtol=1e-5, atol=1e-6)
        assert not average.requires_grad

    written = torch.cat(watch.keys)  # 1440 rows; row i went to slot i modulo 50
    rows = torch.arange(len(written) - 50, len(written))
    slots = torch.empty(50, 8)
    slots[rows % 50] = written[rows]
    assert torch.equal(module.queue.features, slots)


def test_the_readme_example_is_about_forty_lines_and_imports_only_listed_packages():
    source = inspect.getsource(plain_moco)
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))}
    assert imported == {"copy", "torch", "lightning", "vlightning"}
    assert "from vlightning.callbacks import" in source
    assert source.count("from vlightning") == 1
    assert len(inspect.getsource(PlainMoCo).splitlines()) <= 40
