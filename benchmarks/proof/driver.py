"""The driver: some runs at a time, each in a process of its own, until all are finished or the time is over."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from proof.claim import Run, load_claim
from proof.plan import Folders, next_run, planned
from proof.results import append_line
from proof.training import ELSEWHERE, execute

INTERRUPTED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Driver:
    """Do the runs of claims.

    Args:
        names: names or files of the claims, what decides most first.
        folders: where to read and write.
        jobs: runs at a time.
        hours: hours after which running ones are interrupted with a checkpoint; None: until all are finished.
        context: of `multiprocessing`; by default a server that has imported what runs need.
    """

    def __init__(
        self, names: Sequence[str], folders: Folders, jobs: int = 2, hours: float | None = None, context: Any = None
    ) -> None:
        self.claims = [load_claim(name) for name in names]
        self.names = {claim.name: name for claim, name in zip(self.claims, names, strict=True)}
        self.folders = folders
        self.jobs = jobs
        self.deadline = None if hours is None else time.monotonic() + 3600 * hours
        self.context = context or _server()
        self.running: dict[Run, Any] = {}
        self.failed: set[Run] = set()
        self.left_out: set[Run] = set()  # another process does them
        self.stopped = False

    def work(self) -> int:
        """Do all runs; return the number of those that failed."""
        while True:
            while not self._is_over() and len(self.running) < self.jobs and (run := self._next()) is not None:
                self._start(run)
            if not self.running:
                break
            wait([process.sentinel for process in self.running.values()], timeout=1.0)
            if self._is_over():
                self._interrupt()
            self._collect()
        self._say_what_is_left()
        return len(self.failed)

    def stop(self) -> None:
        """Interrupt the runs with a checkpoint, and start no other."""
        self.stopped = True

    def _is_over(self) -> bool:
        return self.stopped or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _next(self) -> Run | None:
        return next_run(self.claims, self.folders, {*self.running, *self.left_out}, self.failed)

    def _start(self, run: Run) -> None:
        process = self.context.Process(target=execute, args=(self.names[run.claim], run, self.folders))
        process.start()
        self.running[run] = process
        say(f"started {shown(run)}")

    def _interrupt(self) -> None:
        """Send the first signal; a second one would end a run without a checkpoint."""
        for process in self.running.values():
            if process.is_alive() and not getattr(process, "is_interrupted", False):
                process.is_interrupted = True
                os.kill(process.pid, signal.SIGTERM)

    def _collect(self) -> None:
        """Remove the processes that have ended."""
        for run, process in list(self.running.items()):
            if process.is_alive():
                continue
            process.join()
            status = process.exitcode
            del self.running[run]
            if status == 0:
                say(f"finished {shown(run)}")
            elif status == ELSEWHERE:
                self.left_out.add(run)
                say(f"another process does {shown(run)}")
            elif status in INTERRUPTED:
                self.left_out.add(run)
                say(f"interrupted {shown(run)}")
            else:
                self._fail(run, status)

    def _fail(self, run: Run, status: int) -> None:
        self.failed.add(run)
        output = self.folders.of(run) / "output.txt"
        say(f"failed {shown(run)}: see {output}")
        tail = output.read_text(errors="replace")[-2000:] if output.is_file() else ""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        log = self.folders.work / "failures.jsonl"
        append_line(log, {"time": now, "run": shown(run), "status": status, "output": tail})

    def _say_what_is_left(self) -> None:
        for claim in self.claims:
            lines = self.folders.lines(claim)
            known = [run for _, run in planned(claim, lines, self.failed)]
            keys = {(line["variant"], line["budget"], line["learning_rate"], line["seed"]) for line in lines}
            left = sum(run.key not in keys for run in known)
            failed = sum(run.claim == claim.name for run in self.failed)
            say(f"{claim.name}: {len(lines)} runs finished, {left} left as far as they are known, {failed} failed")


def shown(run: Run) -> str:
    """Return the name of a run in messages."""
    if not run.budget:
        return f"{run.claim}: preparation {run.variant}"
    return f"{run.claim}: {run.variant}, {run.budget}, learning rate {run.learning_rate:g}, seed {run.seed}"


def say(text: str) -> None:
    """Print a message with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _server() -> Any:
    """Return the context whose server imports everything once, with one thread a library."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["proof.preloaded"])
    return context
