"""Every method trains with compiled blocks or towers: without graph breaks, to the weights of an eager run.

`aot_eager` traces forward and backward passes as the default backend does, and runs them without a compiler. With one,
the middle third of an attention's `in_proj_bias` differs by learning rates: softmax ignores the bias of the keys, whose
true gradient is zero, and Adam follows the signs of rounding errors. All else is equal to 3e-8.
"""

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch.nn import functional
from torch.utils.data import DataLoader

from support.methods import random_batches
from support.methods.albef import RandomPairs, tiny_albef
from support.methods.tiny_modules import SaveSecond, trainer
from support.runs.command_line import run, tiny_config
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from vlightning.callbacks import CompileCallback
from vlightning.callbacks.compile import parts_to_compile
from vlightning.common.errors import UserError

CHANGES = {
    "albef": {"text": {"dropout": 0.0}},
    "cocord": {"student": "resnet14"},
    "mmlg": {},
    "mobileclip": {},
    "shre": {},
}


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
@pytest.mark.parametrize("mode", ["default", "towers"])
@pytest.mark.parametrize("name", random_batches.NAMES)
def test_compiled_parts_train_to_the_same_weights_without_graph_breaks(name, mode, tmp_path):
    plain, parts = trained(name, tmp_path)
    assert parts == 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, parts = trained(name, tmp_path, CompileCallback(mode, backend="aot_eager", fullgraph=True))
    assert parts == len(list(parts_to_compile(compiled, mode == "towers"))) > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("mode", ["default", "towers"])
@pytest.mark.parametrize("name", random_batches.NAMES)
def test_a_training_calls_every_part_that_is_compiled(name, mode, tmp_path, monkeypatch):
    compiled, called = [], set()

    def record(part, **options):
        compiled.append(part)
        part._compiled_call_impl = lambda *args, **kwargs: called.add(part) or part._call_impl(*args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "compile", record)
    module, parts = trained(name, tmp_path, CompileCallback(mode, backend="eager"))
    assert parts == len(compiled) > 0
    averages = set(module.average.modules()) if name == "mobileclip" else set()  # no step calls them
    assert set(compiled) - averages == called


def test_networks_without_blocks_are_a_warning(tmp_path):
    module = random_batches.small("cocord", tmp_path, teacher={"name": "resnet8"})  # one block a stage
    runs = trainer(CompileCallback(backend="eager"), max_steps=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="Nothing is compiled: the networks of CoCoRDModule"):
        runs.fit(module, random_batches.rows_loader("cocord", 16, 8))


def test_towers_are_the_outermost_parts_that_have_a_forward_pass(tmp_path):
    module = random_batches.small("albef", tmp_path)
    expected = [
        part
        for network in (module.student, module.teacher)
        for part in (network.visual_encoder, *network.text_encoder.layers)
    ]
    assert list(parts_to_compile(module, towers=True)) == expected
    foreign = torch.nn.ModuleDict({"a": module.student.visual_encoder})  # calls its networks
    assert list(parts_to_compile(foreign, towers=True)) == [foreign["a"]]


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
def test_texts_padded_to_one_length_compile_a_block_once_and_have_the_same_features(tmp_path):
    module = random_batches.small("albef", tmp_path, text={"dropout": 0.0}).eval()
    (layer, *_) = [part for part in parts_to_compile(module) if part in list(module.student.text_encoder.modules())]
    batches = [torch.randint(104, 120, (4, length)) for length in range(5, 11)]
    plain = [module.encode_texts(ids, torch.ones_like(ids)) for ids in batches]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.compile(backend="aot_eager", fullgraph=True)
    for ids, expected in zip(batches, plain, strict=True):
        padding = (0, 10 - ids.shape[1])
        found = module.encode_texts(functional.pad(ids, padding), functional.pad(torch.ones_like(ids), padding))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


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


def refused_towers():
    """Message of a sharded run that would compile towers."""
    runs = rank_trainer("sharded", max_steps=1, callbacks=[CompileCallback("towers", backend="aot_eager")])
    with pytest.raises(UserError) as refused:
        runs.fit(tiny_albef(), DataLoader(RandomPairs(16), batch_size=4))
    return str(refused.value)


@pytest.mark.slow
def test_sharded_networks_are_not_compiled_as_towers():
    for message in run_distributed(refused_towers, timeout=300):
        assert "set compile: default" in message


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


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Return the options of each compiled part of runs of the command line, which compile nothing."""
    found = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part, **options: found.append(options))
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)
    return found


def saved_argument(version):
    return yaml.safe_load(Path(f"runs/tiny/version_{version}/config.yaml").read_text())["compile"]


def test_one_argument_compiles_a_run_and_those_that_resume_it(compiled):
    ran = run("fit", "--config=tiny.yaml", "--compile", "default")
    assert ran.status == 0, ran.err
    assert compiled
    assert compiled == [{"backend": "inductor", "fullgraph": False}] * len(compiled)
    assert saved_argument(0) == "default"
    parts = len(compiled)
    resumed = ("fit", "--config=tiny.yaml", "--ckpt_path=runs/tiny/version_0/checkpoints/last.ckpt")
    ran = run(*resumed, "--trainer.max_epochs=2")
    assert "compile default" in ran.out
    assert len(compiled) == 2 * parts
    assert saved_argument(1) == "default"
    run(*resumed, "--trainer.max_epochs=2", "--compile=false")
    assert len(compiled) == 2 * parts
    assert saved_argument(2) is False
    assert run("validate", "--config=tiny.yaml", "--compile=default").status == 0


def test_the_argument_is_also_a_key_of_a_config(compiled, tmp_path):
    tiny_config(tmp_path, "more.yaml", "compile: max-autotune")
    assert run("fit", "--config=tiny.yaml", "--config=more.yaml").status == 0
    assert compiled
    assert {options["mode"] for options in compiled} == {"max-autotune-no-cudagraphs"}


def test_one_word_compiles_whole_towers(tmp_path, monkeypatch):
    parts = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part, **options: parts.append(part))
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)
    assert run("fit", "--config=tiny.yaml", "--compile=towers").status == 0
    assert parts
    assert not any(type(part).__name__.endswith("Block") for part in parts)


def test_nothing_is_compiled_without_the_argument(compiled):
    assert run("fit", "--config=tiny.yaml").status == 0
    assert not compiled
    assert saved_argument(0) is False


def test_another_value_and_a_callback_beside_the_argument_are_one_sentence(compiled):
    ran = run("fit", "--config=tiny.yaml", "--compile=fastest")
    assert ran.status == 2
    assert "compile" in ran.sentence
    assert "max-autotune" in ran.sentence
    ran = run("fit", "--config=tiny.yaml", "--compile=default", "--trainer.callbacks+=CompileCallback")
    assert ran.status
    assert "leave one of them out" in ran.sentence
    assert not compiled
