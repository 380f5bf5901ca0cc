"""Run `killed_run.py` in separate processes, and compare the results."""

import contextlib
import json

import pytest
import torch

from support.runs import killed_run
from support.runs.distributed import WorkerError, run_distributed
from vlightning.callbacks import AtomicCheckpointIO

PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
ENDS = {-9: "The process died without a word", 130: "SystemExit: 130", 138: "SystemExit: 138", 143: "SystemExit: 143"}


def run(folder, method, seed, processes=1, status=0, **options):
    """Trains in a folder.

    Args:
        folder: where to.
        method: its name.
        seed: of the run.
        processes: how many.
        status: the exit status that it must have, -9 for a killed run.
        **options: those of `killed_run.train`.
    """
    folder.mkdir(exist_ok=True)
    words, options = (str(folder), method, seed), {"processes": processes, **options}
    ended = contextlib.nullcontext() if status == 0 else pytest.raises(WorkerError, match=ENDS[status])
    with ended:
        run_distributed(_train, words, options, processes=processes, timeout=300)


def _train(words, options):
    killed_run.train(*words, **options)


def recorded(folder, name, rank=0):
    """Return sample indices, or metrics of a validation, by the number of batches that had begun."""
    lines = [json.loads(line) for line in (folder / f"{name}-{rank}.jsonl").read_text().splitlines()]
    by_batch = {}
    for batch, content in lines:
        # A batch that was begun before the kill and again after the resume holds the same samples.
        assert by_batch.setdefault(batch, content) == content
    return by_batch


def assert_same_end(whole, resumed, evaluates=True):
    """Compares samples and final checkpoints bit for bit; returns the leaves of the checkpoint by path."""
    for rank in range(len(list(whole.glob("samples-*.jsonl")))):
        for name in ("samples", "validations") if evaluates else ("samples",):
            assert recorded(resumed, name, rank) == recorded(whole, name, rank)
    assert len(recorded(whole, "samples")) == killed_run.BATCHES_AN_EPOCH * killed_run.EPOCHS
    assert not evaluates or len(recorded(whole, "validations")) == killed_run.EPOCHS
    return assert_same_checkpoints(whole / "final.ckpt", resumed / "final.ckpt")


def assert_same_checkpoints(whole, resumed):
    """Compares weights, optimizers, schedules, counters and averages bit for bit; returns the leaves by path."""
    first, second = (AtomicCheckpointIO().load_checkpoint(path) for path in (whole, resumed))
    expected = dict(_leaves({part: first[part] for part in PARTS}))
    found = dict(_leaves({part: second[part] for part in PARTS}))
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        same = torch.equal(value, found[path]) if isinstance(value, torch.Tensor) else value == found[path]
        assert same, path
    assert any("exp_avg" in path or "momentum_buffer" in path for path in expected)
    for name in first["callbacks"]:
        if name.startswith(("EMACallback", "QueueCallback", "StepSeedCallback")):
            assert first["callbacks"][name] == second["callbacks"][name]
    return expected


def _leaves(tree, path=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, tree
