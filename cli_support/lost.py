"""A run that another process takes with it: a loader worker, or another process of the training, is killed or hangs."""

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

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

# Seconds. A process that lost another one mostly finds out by itself, and knows best what it was doing.
BEFORE_THE_END = 30.0
BEFORE_A_KILL = 5.0
OUT_OF_MEMORY = "most often because memory ran out"
WORKER_ADVICE = f", {OUT_OF_MEMORY}: lower data.num_workers, or give the job more memory"


class LostProcessError(RuntimeError):
    """A process that the run needs has died or does not answer."""


@contextlib.contextmanager
def lost_processes_told(trainer: Trainer) -> Iterator[None]:
    """Run a subcommand: say in one sentence which process was lost, and leave none behind when it fails.

    Args:
        trainer: Whose launcher, if it starts processes, is replaced by one that watches them.

    Raises:
        LostProcessError: In place of torch's error about the worker, or about the connection.
    """
    launcher = trainer.strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        watched = WatchedLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        trainer.strategy._launcher = launcher = watched
    try:
        yield
    except Exception as error:
        codes = launcher.end() if isinstance(launcher, WatchedLauncher) else {}
        found = lost_worker(error) or lost_process(error, trainer.world_size, codes)
        if found is None:
            raise
        raise LostProcessError(f"{found}{_way_on(trainer)}") from error
    finally:
        if isinstance(launcher, WatchedLauncher):
            launcher.ended = True


def lost_worker(error: BaseException) -> str | None:
    """What happened to a loader worker, by torch's error, and what to do; None for other errors."""
    for each in _runtime_errors(error):
        match = re.match(_WORKER, str(each))
        if match is None:
            continue
        pids, name = match.groups()
        if name == "Bus error":
            return (
                f"The loader worker with pid {pids} found no room in shared memory (/dev/shm), through which batches "
                "travel: enlarge it (docker: --shm-size), or lower data.num_workers or data.batch_size"
            )
        how = f"was killed by a signal ({name})" if name else "ended unexpectedly"
        return f"The loader worker with pid {pids} {how}{WORKER_ADVICE}"
    return f"A loader worker ended unexpectedly{WORKER_ADVICE}" if _broke_off(error) else None


def _broke_off(error: BaseException) -> bool:
    """Whether a worker was gone when its batch was to be taken over, and torch did not notice yet that it is dead."""
    if not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        return False
    taking = any(frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__))
    return taking or "in pin memory thread" in str(error)


def lost_process(error: BaseException, processes: int, codes: dict[int, int | None]) -> str | None:
    """What happened to another process of the training, and what to do; None for other errors.

    Args:
        error: What this process raised.
        processes: How many train together.
        codes: Exit status (negative: the signal that killed it) by rank, as far as this process has started them.
    """
    texts = [
        str(each)
        for each in _runtime_errors(error)
        if re.search(_LOST, str(each)) and (isinstance(each, dist.DistError) or re.search(_BACKEND, str(each)))
    ]
    if not texts:
        return None
    for rank, code in codes.items():
        if code:
            fate, advice = _fate(code)
            return f"The process of rank {rank} {fate}, and the others cannot go on without it: {advice}"
    who = f"another of the {processes} processes" if processes > 1 else "another process"
    if any(re.search(_SILENCE, text) for text in texts):
        return (
            f"Waited in vain for {who} of this run, which hangs, has been stopped, or is slower than the time limit of "
            "the collective operations: look at what it does and last said, and raise the limit "
            "(trainer.strategy.timeout) if it needs longer"
        )
    return f"Lost the connection to {who} of this run, which has died: look at what it last said, and at its memory"


# What torch says of a loader worker; and what gloo, NCCL and the store that they meet at say.
_WORKER = r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.)?"
_BACKEND = r"(?i)gloo|nccl|c10d|process ?group"
_SILENCE = r"(?i)timed out|time-?out"
_LOST = rf"{_SILENCE}|connection (was (likely )?)?(closed|reset|refused|aborted)|broken pipe|remote process"


def _runtime_errors(error: BaseException | None) -> Iterator[RuntimeError]:
    """The runtime errors among an error and those that led to it."""
    while error is not None:
        if isinstance(error, RuntimeError):
            yield error
        error = error.__cause__ or error.__context__


def _fate(code: int) -> tuple[str, str]:
    """How a process ended, and what to do about it."""
    if code == -signal.SIGKILL:
        return f"was killed by SIGKILL, {OUT_OF_MEMORY}", "give the job more memory, or lower data.num_workers"
    advice = "look at what it last said"
    if code > 0:
        return f"ended with status {code}", advice
    known = -code in {each.value for each in signal.Signals}
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}", advice


def _way_on(trainer: Trainer) -> str:
    """The end of the sentence: from which checkpoint a training goes on."""
    if trainer.state.fn != "fit":
        return "."
    paths = {
        Path(path)
        for callback in trainer.checkpoint_callbacks
        for path in (getattr(callback, "best_model_path", None), getattr(callback, "last_model_path", None))
        if path and Path(path).exists()
    }
    if not paths:
        return "; no checkpoint had been written."
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    return f"; go on with --ckpt_path {newest}"


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, whose observer thread here lets this process end by itself when another one has died.

    Lightning's own (2.6.6) kills this process within five seconds, without a word, in the middle of whatever it does.
    """

    ended = False  # nothing is left to watch over

    @property
    def others(self) -> dict[int, subprocess.Popen]:
        """The processes that this one has started, by rank."""
        first = int(os.environ.get("NODE_RANK", "0")) * self.num_processes
        return dict(enumerate(self.procs, start=first + 1))

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._watch, name="process-watch", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def end(self) -> dict[int, int | None]:
        """Give the processes a moment to end by themselves, then kill them.

        Returns:
            Exit status by rank on this node; None for those that had to be killed.
        """
        deadline = time.monotonic() + BEFORE_A_KILL
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        codes = {rank: process.poll() for rank, process in self.others.items()}
        for process in self.procs:
            process.kill()
        return codes

    def _watch(self) -> None:
        while not any((codes := {rank: process.poll() for rank, process in self.others.items()}).values()):
            if self.ended or all(code == 0 for code in codes.values()):
                return
            time.sleep(1.0)
        deadline = time.monotonic() + BEFORE_THE_END
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.ended:
            return
        rank, code = next((rank, code) for rank, code in codes.items() if code)
        fate, advice = _fate(code)
        sys.stderr.write(
            f"vlightning: error: The process of rank {rank} {fate}, and the others did not end by themselves within "
            f"{BEFORE_THE_END:g} seconds, so they are killed: {advice}.\n"
        )
        sys.stderr.flush()
        for process in self.procs:
            process.kill()
        os._exit(1)
