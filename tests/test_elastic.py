"""A run that goes on with another number of processes, against the uninterrupted one."""

import pytest
import torch

from support.distributed import run_distributed
from support.elastic import STOP, train, train_several
from support.methods import METHODS

STRATEGIES = {"albef": ("ddp", "sharded")}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_with_more_or_fewer_processes_as_if_it_had_not_stopped(method, tmp_path, caplog, recwarn):
    prepared = METHODS[method].prepare(tmp_path)
    strategies = STRATEGIES.get(method, ("ddp",))
    whole = train("one", method, prepared, tmp_path, tmp_path / "one.ckpt")
    jobs = [
        (kind, method, prepared, tmp_path, *paths)
        for kind in strategies
        for paths in ((tmp_path / f"{kind}.ckpt",), (None, tmp_path / "one.ckpt"))
    ]
    ranks = run_distributed(train_several, jobs)
    for number, job in enumerate(jobs):
        start = 0 if len(job) == 5 else STOP
        halves = [rank[number] for rank in ranks]
        assert_same(halves[0], whole)
        samples = [first + second for first, second in zip(*(half["samples"] for half in halves), strict=True)]
        assert samples == whole["samples"][start:]
    for kind in strategies:
        caplog.clear()
        with caplog.at_level("INFO"):
            resumed = train("one", method, prepared, tmp_path, None, tmp_path / f"{kind}.ckpt")
        assert_same(resumed, whole)
        assert resumed["samples"] == whole["samples"][STOP:]
        assert "2 processes before, 1 now: the run goes on with the same batches and draws." in caplog.text
    assert not [warning for warning in recwarn if "not exactly" in str(warning.message)]


def assert_same(found, expected):
    for part in ("state", "moments"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            torch.testing.assert_close(
                found[part][name], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
