"""Runs of `killed_run.py` as processes of their own, and what they left behind."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from support import killed_run

TESTS = Path(killed_run.__file__).parents[1]
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")


def run(folder, *args, killed=False):
    """Trains in a folder; arguments as in `killed_run.py`."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, killed_run.__file__, str(folder), *map(str, args)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == (-9 if killed else 0), process.stderr[-3000:]


def assert_resumed_run_is_whole(tmp_path, every_n_steps, accumulate, hook, batch, *words):
    """Kills a run in a hook, resumes it, and compares it with one that nothing happened to.

    Returns:
        The leaves of the final checkpoint by path.
    """
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    killed = (resumed, 1, every_n_steps, accumulate, "--kill", hook, batch, *words)
    with ThreadPoolExecutor() as pool:  # they have nothing to do with each other
        for done in [pool.submit(run, whole, 1, 0, accumulate, *words), pool.submit(run, *killed, killed=True)]:
            done.result()
    assert not (resumed / "final.ckpt").exists()
    # Another seed: everything that matters has to come from the checkpoint.
    run(resumed, 2, every_n_steps, accumulate, "--resume", resumed / "last.ckpt", *words)
    return assert_same_end(whole, resumed)


def samples(folder):
    """Sample indices by batch."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    by_batch = {}
    for batch, rows in lines:
        # A batch that was begun before the kill and again after the resume holds the same samples.
        assert by_batch.setdefault(batch, rows) == rows
    return by_batch


def assert_same_end(whole, resumed):
    """Compares samples and final checkpoints bit for bit; returns the leaves of the checkpoint by path."""
    assert samples(resumed) == samples(whole)
    assert len(samples(whole)) == killed_run.BATCHES_AN_EPOCH * killed_run.EPOCHS
    first, second = (torch.load(folder / "final.ckpt", weights_only=True) for folder in (whole, resumed))
    expected = dict(_leaves({part: first[part] for part in PARTS}))
    found = dict(_leaves({part: second[part] for part in PARTS}))
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        same = torch.equal(value, found[path]) if isinstance(value, torch.Tensor) else value == found[path]
        assert same, path
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
