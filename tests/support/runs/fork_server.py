"""A server that has imported what tests run, and of which processes are forked that are ready at once.

Python with torch, Lightning and this package takes ten seconds of a processor to start; a fork takes a tenth of one.
The workers of pytest-xdist have one server together.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SHARED = "VLIGHTNING_TEST_FORK_SERVER"
# What a test changes for a while must not reach the imports of the server, which all later tests share.
_AT_THE_START = dict(os.environ)


def share_server() -> None:
    """Start the server of all workers; for the process that starts them."""
    fork_context("support.runs.preloaded", "support.runs.quiet")
    os.environ[_SHARED] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def fork_context(*modules: str) -> ForkServerContext:
    """Start the server, unless it runs, with one thread a library; return the context whose processes it forks.

    Args:
        *modules: What it imports first; by default `support.runs.preloaded`.
    """
    context = multiprocessing.get_context("forkserver")
    if forkserver.get_inherited_fds() is not None or _SHARED in _AT_THE_START:
        _use_running_server()
        return context
    before = dict(os.environ)
    path = os.pathsep.join([str(TESTS), *filter(None, [_AT_THE_START.get("PYTHONPATH")])])
    try:
        _set_environment(_AT_THE_START | ONE_THREAD | {"PYTHONPATH": path})
        context.set_forkserver_preload(list(modules or ("support.runs.preloaded",)))
        forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def _use_running_server() -> None:
    """Use the server of the workers, or in a process that a server has forked, that server."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address is None:
        server._forkserver_address = _AT_THE_START[_SHARED]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the process that started it keeps it alive
    server.ensure_running = lambda: None


def enter(folder: str, environment: dict[str, str], path: list[str]) -> None:
    """Give a process that has just been forked its folder, environment and module search path."""
    from support.runs.preloaded import SET_BY_IMPORTS

    _set_environment(SET_BY_IMPORTS | environment)
    os.chdir(folder)
    sys.path[:] = path


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
