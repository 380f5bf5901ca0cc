"""The traffic of each method's processes equals the formulas of `benchmarks/formulas.py`."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from formulas import Run, describe, gathered, traffic
from traffic import CountTraffic, Sent, TrafficOfSteps, on_the_wire, totals

from support.methods.random_batches import NAMES, rows_loader, small
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import FeatureQueue, SkipNonFiniteSteps, StopOnSignal, gather

ROWS, STEPS, STEADY = 4, 4, 2  # DDP arranges its buckets anew in the second step
QUEUES = {name: {"contrast": {"queue_size": 256}} for name in ("albef", "cocord")}


def one_step(names, flags):
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            # Queues larger than all that is broadcast.
            module = small(name, Path(folder), **QUEUES.get(name, {}))
            counted = TrafficOfSteps()
            callbacks = [counted, *([SkipNonFiniteSteps(), StopOnSignal()] if flags else [])]
            trainer = rank_trainer("ddp", max_steps=STEPS, callbacks=callbacks)
            trainer.fit(module, rows_loader(name, ROWS * STEPS * dist.get_world_size(), ROWS))
        processes = dist.get_world_size()
        method, run = describe(module), Run(ROWS * processes, processes)
        formula = {kind: tuple(each) for kind, each in traffic(method, run, flags).items()}
        queues = [part.features.nbytes for part in module.modules() if isinstance(part, FeatureQueue)]
        found.append(([tuple(each) for each in counted.steps[STEADY]], formula, queues, gathered(method, run)))
    return found


def compare(sent, formula, queues, memory):
    sent = [Sent(*each) for each in sent]
    found = totals(sent)
    # In buckets, and one operation for each type.
    found |= {kind: found[kind]._replace(calls=1) for kind in ("gradients", "buffers") if kind in found}
    assert {kind: tuple(each) for kind, each in found.items()} == formula
    for size in queues:
        assert all(each.bytes < size for each in sent if each.operation == "broadcast")
    gathers = [each for each in sent if each.operation == "all-gather"]
    assert len(gathers) == len({each.kind for each in gathers})  # nothing twice
    assert sum(each.gathered for each in gathers) == memory


@pytest.fixture(scope="module")
def sent_by_two():
    return [dict(zip(NAMES, found, strict=True)) for found in run_distributed(one_step, NAMES, True)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_send_the_bytes_of_the_formula(name, sent_by_two):
    for found in sent_by_two:
        compare(*found[name])


def test_three_processes_send_the_bytes_of_the_formula_without_flags():
    names = ("albef", "shre")
    for found in run_distributed(one_step, names, False, processes=3):
        for each in found:
            compare(*each)
            assert not any(kind.startswith("flag") and "Lightning" not in kind for kind in each[1])


def gather_twice():
    rows = torch.ones(3, 2, requires_grad=True)
    with CountTraffic() as counted:
        gather(rows, gradient=True).sum().backward()
        gather(rows)
        gather(rows)
        gather(torch.arange(3))
    return [tuple(each) for each in counted.sent]


def test_the_counter_sees_each_operation_once_and_names_it():
    for sent in run_distributed(gather_twice):
        assert sent == [
            ("features", "all-gather", 24, (3, 2), 48),
            ("gradients of features", "reduce-scatter", 48, (6, 2), 0),
            ("keys", "all-gather", 24, (3, 2), 48),
            ("keys", "all-gather", 24, (3, 2), 48),
            ("ids", "all-gather", 24, (3,), 48),
        ]
        with pytest.raises(AssertionError):
            compare(sent, {kind: tuple(each) for kind, each in totals([Sent(*each) for each in sent]).items()}, [], 144)


def test_bytes_in_a_ring():
    # Four processes, 4 bytes each or 16 that all have: a ring hands on a quarter three times, or twice three times.
    assert on_the_wire("all-gather", 4, 4) == 12
    assert on_the_wire("reduce-scatter", 16, 4) == 12
    assert on_the_wire("all-reduce", 16, 4) == 24
    assert on_the_wire("broadcast", 16, 4) == 12
    assert on_the_wire("all-reduce", 16, 1) == 0
