"""Every method trains with compiled blocks: without graph breaks, to the weights of a run that is not compiled.

`aot_eager` traces forward and backward passes as the default backend does, and runs them without a compiler.
"""

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from support import random_batches
from support.albef import RandomPairs, tiny_albef
from support.distributed import rank_trainer, run_distributed, whole_state
from support.tiny_modules import SaveSecond, trainer
from vlightning.callbacks import CompileCallback
from vlightning.callbacks.compile import parts_to_compile

CHANGES = {"albef": {"text": {"dropout": 0.0}}, "cocord": {}, "mmlg": {}, "mobileclip": {}, "shre": {}}


class Compiled(Callback):
    """Counts the parts that are compiled."""

    parts = 0

    def on_train_start(self, runs, module):
        self.parts = sum(part._compiled_call_impl is not None for part in module.modules())


def trained(name, folder, *callbacks, **changes):
    module = random_batches.small(name, folder, **CHANGES[name] | changes)
    torch.manual_seed(0)
    counted = Compiled()
    runs = trainer(*callbacks, counted, max_steps=2, default_root_dir=folder)
    runs.fit(module, random_batches.rows_loader(name, 16, 8))
    assert runs.global_step == 2
    return module, counted.parts


@pytest.mark.slow
@pytest.mark.parametrize("name", random_batches.NAMES)
def test_compiled_blocks_train_to_the_same_weights_without_graph_breaks(name, tmp_path):
    plain, parts = trained(name, tmp_path)
    assert parts == 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, parts = trained(name, tmp_path, CompileCallback(backend="aot_eager", fullgraph=True))
    assert parts == len(list(parts_to_compile(compiled))) > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.slow
def test_texts_of_many_lengths_compile_a_block_at_most_twice(tmp_path):
    module = random_batches.small("albef", tmp_path, text={"dropout": 0.0})
    block = module.student.text_encoder
    (layer, *_) = [part for part in parts_to_compile(module) if part in list(block.modules())]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.compile(backend="aot_eager", fullgraph=True)
    for length in range(5, 11):
        ids = torch.randint(104, 120, (4, length))
        module.encode_texts(ids, torch.ones_like(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_a_compiled_run_resumes_exactly_also_in_slices(tmp_path):
    def fit(resumed=None):
        module = random_batches.small("mobileclip", tmp_path, memory={"micro_batch_size": 4})
        compiling = CompileCallback(backend="aot_eager", fullgraph=True)
        saving = SaveSecond(tmp_path / "second.ckpt")
        runs = trainer(compiling, saving, max_steps=4, max_epochs=-1, default_root_dir=tmp_path)
        runs.fit(module, random_batches.rows_loader("mobileclip", 8, 8), ckpt_path=resumed)
        assert runs.global_step == 4
        return module.state_dict()

    whole, resumed = fit(), fit(tmp_path / "second.ckpt")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def sharded_states():
    """Whole states after two steps with FSDP2, plain and compiled, and the number of compiled parts."""
    states = []
    for callbacks in ([], [CompileCallback(backend="aot_eager")]):
        module = tiny_albef(text={"dropout": 0.0})
        runs = rank_trainer("sharded", max_steps=2, max_epochs=-1, callbacks=callbacks)
        runs.fit(module, DataLoader(RandomPairs(16), batch_size=4))
        parts = sum(part._compiled_call_impl is not None for part in module.modules())
        states.append((whole_state(module), parts))
    return states


@pytest.mark.slow
def test_compiled_blocks_train_to_the_same_weights_when_they_are_sharded():
    for (plain, none), (compiled, parts) in run_distributed(sharded_states, timeout=300):
        assert (none, parts > 3) == (0, True)
        for name, value in plain.items():
            torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_network_without_blocks_is_compiled_as_a_whole():
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    assert list(parts_to_compile(module)) == [module["a"]]
