"""A training of any method that was killed or stopped, and resumed, equals the uninterrupted run bit for bit.

Every tensor of module, optimizer, schedule, average and queue, the samples of every batch and the metrics of every
validation are compared. The uninterrupted run loads in its own process, the killed one in two workers, and the resumed
one in one, with another seed.
"""

import json
from typing import NamedTuple

import pytest
from filelock import FileLock

from support.methods.methods import METHODS, OTHERS
from support.runs.resume import assert_same_end, run


class Kill(NamedTuple):
    """Place and way of a run's end."""

    where: str
    hook: str  # of `support.runs.killed_run.Sender`
    batch: int  # the number of batches that have begun
    every_n_steps: int | None  # between two checkpoints; None: at the end of each epoch
    accumulate: int = 1
    signal: str = "SIGKILL"
    status: int = -9


KILLS = {
    "killed in mid-epoch": Kill("before the optimizer's step", "on_before_optimizer_step", 7, 3),
    "killed between two batches of one step": Kill("in the second of them", "on_train_batch_start", 8, 1, 2),
    "killed on the last batch of an epoch": Kill("after its checkpoint", "on_train_epoch_end", 8, 4),
    "killed after an epoch's end": Kill("before the next one's first batch", "on_train_epoch_start", 8, None),
    "killed in validation": Kill("before its first batch", "on_validation_batch_start", 8, 3),
    "killed during a checkpoint write": Kill("before it gets its name", "checkpoint", 7, 3),
    "stopped in mid-epoch": Kill("in a step", "on_before_optimizer_step", 6, None, 1, "SIGTERM", 143),
    "stopped in validation": Kill("in its first batch", "on_validation_batch_start", 8, None, 1, "SIGUSR1", 138),
}
PROMISE = "resumed with other worker count and seed: the same end, bit for bit"
PROCESSES = {"one process": (1, False), "two processes": (2, False), "two sharded processes": (2, True)}
# Without --all-faults: ALBEF with every fault, every method with one.
FIRST = "albef"
ONE = {name: ("killed in mid-epoch", "two processes") for name in METHODS}
ONE |= {name: ("killed in mid-epoch", "one process") for name in OTHERS}
EASIER = (
    "killed in mid-epoch",
    "killed during a checkpoint write",
    "stopped in mid-epoch",
)  # than two under DDP, or other


def cases():
    for method in METHODS | OTHERS:
        for name, kill in KILLS.items():
            if method == "assignment" and kill.hook == "on_validation_batch_start":
                continue  # it has no evaluation
            for among in PROCESSES if method in METHODS else ["one process"]:
                always = (name, among) == ONE[method] or (
                    method == FIRST and (among == "two processes" or name in EASIER)
                )
                fault = pytest.mark.fault(f"{name}, {among}", f"{kill.signal} to all, {kill.where}", PROMISE)
                marks = [fault, pytest.mark.slow, *([] if always else [pytest.mark.all_faults])]
                yield pytest.param(method, kill, *PROCESSES[among], marks=marks, id=f"{method}, {name}, {among}")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, worker_id):
    """Files of a method, and the folder of its uninterrupted run; made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "whole"
    root.mkdir(exist_ok=True)

    def once(name, make):
        folder = root / name
        with FileLock(f"{folder}.lock"):
            if not (folder / "made.json").exists():
                folder.mkdir()
                (folder / "made.json").write_text(json.dumps(make(folder)))
        return folder, json.loads((folder / "made.json").read_text())

    def prepare(method, **options):
        def outside(folder):
            made = (METHODS | OTHERS)[method].prepare(folder)
            (METHODS | OTHERS)[method].build(made, seed=0)[1].prepare_data()
            return made

        _, options["outside"] = once(method, outside)
        name = "-".join(map(str, (method, *list(options.values())[:-1])))
        whole, _ = once(name, lambda folder: run(folder, method, 1, workers=0, **options))
        return options, whole

    return prepare


@pytest.mark.parametrize(("method", "kill", "processes", "sharded"), list(cases()))
def test_a_killed_run_resumes_exactly(tmp_path, prepared, method, kill, processes, sharded):
    options, whole = prepared(method, processes=processes, sharded=sharded, accumulate=kill.accumulate)
    options["every_n_steps"] = kill.every_n_steps
    run(tmp_path, method, 1, **options, send=(kill.signal, kill.hook, kill.batch), status=kill.status)
    assert not (tmp_path / "final.ckpt").exists()
    run(tmp_path, method, 2, resume=str(tmp_path / "last.ckpt"), workers=1, **options)
    leaves = assert_same_end(whole, tmp_path, evaluates=method != "assignment")
    _, _, state, outside = (METHODS | OTHERS)[method]
    for part in state:
        assert any(path.startswith(f"/state_dict/{part}") for path in leaves), part
    assert not any(path.startswith(f"/state_dict/{part}") for part in outside for path in leaves)
    assert not list(tmp_path.glob(".incomplete-*")), "debris of the killed save"
