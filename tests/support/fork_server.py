"""A server that has imported what tests run, and of which processes are forked that are ready at once.

Python with torch, Lightning and this package takes ten seconds of a processor to start; a fork takes a tenth of one.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# What a test changes for a while must not reach the imports of the server, which all later tests share.
_AT_THE_START = dict(os.environ)


def fork_context() -> ForkServerContext:
    """Start the server, unless it runs, with one thread a library; return the context whose processes it forks."""
    context = multiprocessing.get_context("forkserver")
    before = dict(os.environ)
    path = os.pathsep.join([str(TESTS), *filter(None, [_AT_THE_START.get("PYTHONPATH")])])
    try:
        _set_environment(_AT_THE_START | ONE_THREAD | {"PYTHONPATH": path})
        context.set_forkserver_preload(["support.preloaded"])
        forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def enter(folder: str, environment: dict[str, str], path: list[str]) -> None:
    """Give a process that has just been forked its folder, environment and module search path."""
    from support.preloaded import SET_BY_IMPORTS

    _set_environment(SET_BY_IMPORTS | environment)
    os.chdir(folder)
    sys.path[:] = path


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
