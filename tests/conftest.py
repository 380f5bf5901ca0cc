"""Configuration of all tests."""

import atexit
import gc
import os

import pytest

from support.project.tiers import starts_something
from support.runs.fork_server import share_server
from support.runs.started import Started

pytest_plugins = ["support.runs.faults"]

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Before torch is imported, which would start as many threads as there are cores in every worker of pytest-xdist, and in
# every process that a test starts: threads that wait for one another by spinning.
if workers > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def pytest_configure(config):
    if workers_are_started_by(config) and "unit" not in config.option.markexpr:
        share_server()


def workers_are_started_by(config):
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_collection_modifyitems(config, items):
    if "unit" not in config.option.markexpr:  # it takes seconds in every worker to find them
        return
    for item in items:
        if item.get_closest_marker("slow") is None and not starts_something(item.path, item.originalname):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish():
    gc.freeze()  # a collection would go through what is imported, a second each time
    atexit.register(gc.unfreeze)  # or triton reports leaks


@pytest.fixture(autouse=True)
def environment_of_a_run():
    """Remove the ranks and the seed that a run leaves in the environment, which the next test's runs would inherit."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture
def started():
    """The threads and child processes that the test starts."""
    return Started()
