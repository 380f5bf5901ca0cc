"""A run that was killed and resumed is bit for bit the run that was never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import killed_run

TESTS = Path(killed_run.__file__).parents[1]


def _run(folder, *args, killed=False):
    folder.mkdir(exist_ok=True)
    process = subprocess.run(
        [sys.executable, killed_run.__file__, str(folder), *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == (-9 if killed else 0), process.stderr[-3000:]


def _samples(folder):
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    by_batch = {}
    for batch, samples in lines:
        # A batch that was begun before the kill and again after the resume holds the same samples.
        assert by_batch.setdefault(batch, samples) == samples
    return by_batch


def _tensors(tree, path=""):
    """Every leaf of a checkpoint by path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _tensors(value, f"{path}/{index}")
    else:
        yield path, tree


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = {}

    def run(accumulate, *options):
        key = accumulate, *options
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole")
            _run(runs[key], 1, 1, accumulate, *options)
        return runs[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_n_steps", "accumulate", "hook", "batch", "options"),
    [
        pytest.param(1, 1, "on_before_optimizer_step", 7, (), id="mid-epoch"),
        pytest.param(2, 2, "on_train_batch_start", 8, (), id="mid-epoch-accumulating"),
        pytest.param(4, 1, "on_train_epoch_end", 8, (), id="last-batch"),
        pytest.param(0, 1, "on_train_epoch_start", 8, (), id="epoch-end"),
        pytest.param(3, 1, "on_validation_batch_start", 8, (), id="validation"),
        pytest.param(1, 1, "on_before_optimizer_step", 7, ("--fine-tuning",), id="fine-tuning"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path, uninterrupted, every_n_steps, accumulate, hook, batch, options
):
    whole = uninterrupted(accumulate, *options)
    _run(tmp_path, 1, every_n_steps, accumulate, "--kill", hook, batch, *options, killed=True)
    assert not (tmp_path / "final.ckpt").exists()
    # Another seed: everything that matters has to come from the checkpoint.
    _run(tmp_path, 2, every_n_steps, accumulate, "--resume", tmp_path / "last.ckpt", *options)

    assert _samples(tmp_path) == _samples(whole)
    assert len(_samples(whole)) == killed_run.BATCHES_AN_EPOCH * killed_run.EPOCHS

    first, second = (torch.load(folder / "final.ckpt", weights_only=True) for folder in (whole, tmp_path))
    parts = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    expected = dict(_tensors({part: first[part] for part in parts}))
    found = dict(_tensors({part: second[part] for part in parts}))
    assert any(path.startswith("/state_dict/teacher.") for path in expected)
    assert any("queue.features" in path for path in expected)
    assert any("exp_avg" in path for path in expected)
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        same = torch.equal(value, found[path]) if isinstance(value, torch.Tensor) else value == found[path]
        assert same, path
    for name in first["callbacks"]:
        if name.startswith(("EMACallback", "QueueCallback", "StepSeedCallback")):
            assert first["callbacks"][name] == second["callbacks"][name]
