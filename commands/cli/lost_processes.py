"""The start of processes on one node, and messages for a run whose process or loader worker is killed or hangs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from typing_extensions import override

from ...common.errors import UserError
from ...common.private_api import SubprocessScriptLauncher, set_launcher

OUT_OF_MEMORY = "most often because memory ran out"
WORKER_ADVICE = f", {OUT_OF_MEMORY}: lower data.num_workers, or give the job more memory"
# Torch's error about a loader worker, and those of gloo, NCCL and their store.
_WORKER = r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.)?"
_BACKEND = r"(?i)gloo|nccl|c10d|process ?group"
_SILENCE = r"(?i)timed out|time-?out"
_LOST = rf"{_SILENCE}|connection (was (likely )?)?(closed|reset|refused|aborted)|broken pipe|remote process"


@contextlib.contextmanager
def lost_processes_reported(trainer: Trainer) -> Iterator[None]:
    """Run a subcommand: name the lost process in one sentence, and leave no process behind.

    Raises:
        UserError: In place of torch's error about the worker, or about the connection.
    """
    launcher = watched(trainer, _report_end)
    try:
        yield
    except Exception as error:
        statuses = launcher.end() if launcher is not None else {}
        sentence = lost_worker(error) or lost_process(error, trainer.world_size, statuses)
        if sentence is None:
            raise
        raise UserError(f"{sentence}{_checkpoint_to_resume_from(trainer)}") from error
    finally:
        if launcher is not None:
            launcher.ended.set()


def lost_worker(error: BaseException) -> str | None:
    """Return the cause of a loader worker's end, by torch's error, and the remedy; None for other errors."""
    for each in _runtime_errors(error):
        if (match := re.match(_WORKER, str(each))) is None:
            continue
        pids, name = match.groups()
        if name == "Bus error":
            return (
                f"The loader worker with pid {pids} found no room in shared memory (/dev/shm), through which batches "
                "travel: enlarge it (docker: --shm-size), or lower data.num_workers or data.batch_size"
            )
        how = f"was killed by a signal ({name})" if name else "ended unexpectedly"
        return f"The loader worker with pid {pids} {how}{WORKER_ADVICE}"
    # A worker died while its batch was being received, and torch has not noticed yet.
    is_disconnected = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not is_disconnected or not ("_try_get_data" in frames or "in pin memory thread" in str(error)):
        return None
    # Torch's handler of SIGCHLD raises when this process learns of the end: here, and not while the error is shown.
    with contextlib.suppress(RuntimeError):
        time.sleep(0.2)
    return f"A loader worker ended unexpectedly{WORKER_ADVICE}"


def lost_process(error: BaseException, processes: int, statuses: dict[int, int | None]) -> str | None:
    """Return the cause of another process's end, and the remedy; None for other errors.

    Args:
        error: The exception of this process.
        processes: Number of processes of the training.
        statuses: Exit status (negative: the signal) by rank of the processes that this one has started.
    """
    texts = [
        str(each)
        for each in _runtime_errors(error)
        if re.search(_LOST, str(each)) and (isinstance(each, dist.DistError) or re.search(_BACKEND, str(each)))
    ]
    if not texts:
        return None
    for rank, status in statuses.items():
        if status:
            cause, remedy = _cause(status)
            return f"The process of rank {rank} {cause}, and the others cannot go on without it: {remedy}"
    who = f"another of the {processes} processes" if processes > 1 else "another process"
    if any(re.search(_SILENCE, text) for text in texts):
        return (
            f"No answer from {who} of this run, which hangs, was stopped, or is slower than the time limit of the "
            "collective operations: look at its last output, and raise the limit (trainer.strategy.timeout) if it "
            "needs longer"
        )
    return f"Lost the connection to {who} of this run, which has died: look at its last output, and at its memory"


def _runtime_errors(error: BaseException | None) -> Iterator[RuntimeError]:
    """Yield the runtime errors among an error and its causes."""
    while error is not None:
        if isinstance(error, RuntimeError):
            yield error
        error = error.__cause__ or error.__context__


def _cause(status: int) -> tuple[str, str]:
    """Return how a process ended, and the remedy."""
    if status == -signal.SIGKILL:
        return f"was killed by SIGKILL, {OUT_OF_MEMORY}", "give the job more memory, or lower data.num_workers"
    is_signal = -status in {each.value for each in signal.Signals}
    name = signal.Signals(-status).name if is_signal else f"signal {-status}"
    return f"ended with status {status}" if status > 0 else f"was killed by {name}", "look at its last output"


def _report_end(rank: int, status: int) -> None:
    cause, remedy = _cause(status)
    sys.stderr.write(
        f"vlightning: error: The process of rank {rank} {cause}, and the others did not end by themselves within "
        f"{BEFORE_THE_END:g} seconds, so they are killed: {remedy}.\n"
    )
    sys.stderr.flush()


def _checkpoint_to_resume_from(trainer: Trainer) -> str:
    """Return the end of the sentence: the checkpoint from which a training can be resumed."""
    if trainer.state.fn != "fit":
        return "."
    paths = [
        Path(path)
        for callback in trainer.checkpoint_callbacks
        for path in (getattr(callback, "best_model_path", None), getattr(callback, "last_model_path", None))
        if path and Path(path).exists()
    ]
    if not paths:
        return "; no checkpoint had been written."
    return f"; go on with --ckpt_path {max(paths, key=lambda path: path.stat().st_mtime)}"


# Seconds. A process that lost another one mostly raises an error by itself, which has the better description.
BEFORE_THE_END = 30.0
BEFORE_A_KILL = 5.0


class WatchedLauncher(SubprocessScriptLauncher):
    """Start the processes, and give this one time to raise an error when another one has died.

    Lightning's own launcher (2.6.6) starts a thread that kills this process within five seconds after another's death,
    without a message, in the middle of its work. Here the thread waits for half a minute, since a process in a
    collective operation mostly notices a death by itself. Only then, with this process stuck in a library where no
    Python code can run, it reports the death and ends all processes. The main thread cannot do this: while it is
    blocked in a collective operation, neither a signal handler nor an exception reaches it, and the time limit of the
    operation is half an hour.

    Args:
        launcher: Lightning's launcher, which this one replaces.
        report: Called before the end with the rank and the exit status of the dead process.
    """

    def __init__(self, launcher: SubprocessScriptLauncher, report: Callable[[int, int], None]) -> None:
        super().__init__(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        self.report = report
        self.ended = threading.Event()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self.watch, name="process-watch", daemon=True).start()
        if "OMP_NUM_THREADS" not in os.environ:  # as Lightning's launchers do
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = max(1, cpus // self.num_processes)
            torch.set_num_threads(threads)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        return function(*args, **kwargs)

    def statuses(self) -> dict[int, int | None]:
        """Return the exit status of each other process on this node by rank; None for one that runs."""
        first = int(os.environ.get("NODE_RANK", "0")) * self.num_processes + 1
        return {rank: process.poll() for rank, process in enumerate(self.procs, start=first)}

    def end(self) -> dict[int, int | None]:
        """Give the processes a moment to end by themselves, then kill them.

        Returns:
            Exit status by rank on this node; None for those that had to be killed.
        """
        deadline = time.monotonic() + BEFORE_A_KILL
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        statuses = self.statuses()
        for process in self.procs:
            process.kill()
        return statuses

    def watch(self) -> None:
        """Wait until the run has ended; if a process dies and the run does not end, end all processes."""
        while not any((statuses := self.statuses()).values()):
            if self.ended.wait(1.0) or all(status == 0 for status in statuses.values()):
                return
        if self.ended.wait(BEFORE_THE_END):
            return
        self.report(*next((rank, status) for rank, status in statuses.items() if status))
        for process in self.procs:
            process.kill()
        os._exit(1)


def watched(trainer: Trainer, report: Callable[[int, int], None]) -> WatchedLauncher | None:
    """Replace the Trainer's launcher by one that watches its processes; None if it starts none."""
    launcher = trainer.strategy.launcher
    if type(launcher) is not SubprocessScriptLauncher:
        return None
    replacement = WatchedLauncher(launcher, report)
    set_launcher(trainer.strategy, replacement)
    return replacement
