"""`python SCRIPT WORDS...`, or `python -m MODULE WORDS...`, in a process of its own, forked instead of
executed: it is ready within a fifth of a second.

    done = run_script([VLIGHTNING, "fit", "--config=tiny.yaml"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr

The process has its own pid, session, process group, folder, environment, `sys.argv`, `sys.path` and files 0 to 2. It
executes the script from its first line as `__main__`, gets real signals, and ends as an interpreter does: by
`SystemExit`, by an uncaught error with its traceback, by the signal; threads are awaited, exit handlers are run.

Execute the interpreter instead where one of these differences matters:

- Modules that the server has imported (`support.runs.preloaded`) are there: imports neither take time, nor print, warn,
  ask the network or set variables; `sys.modules` holds more than the script imported.
- What is read at import or by the interpreter itself is the server's: the numbers of threads (one), HF_*, MPLBACKEND,
  TORCH_*, PYTHONHASHSEED, PYTHONWARNINGS, command-line options of `python`, `sys.orig_argv`. So all forks have one hash
  seed: sets of strings have the same order in all of them. Variables that the imports set are set, Lightning's rank is
  read again.
- The parent is the server, and `multiprocessing` knows that it started the process.
- After the exit handlers the process is gone: nothing is finalized.

The other processes of a node, which Lightning's launcher starts from the script, are forked too unless `executes`; what
else the script starts is executed as usual.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import selectors
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from support.runs.fork_server import enter, fork_context

VLIGHTNING = Path(sysconfig.get_path("scripts")) / "vlightning"
"""The script that `pip` installed."""


class Forked:
    """The process, with the methods of `subprocess.Popen`.

    Args:
        command: The script and its words, or `-m`, a module and its words.
        cwd: Its folder, that of the caller if None.
        env: Its environment, that of the caller if None.
        terminal: A file descriptor that is its input and output; otherwise the input is empty, and the output is
            captured.
        merged: Whether standard error goes where standard output goes.
        executes: Whether processes that Lightning's launcher starts are executed.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        terminal: int | None = None,
        merged: bool = False,
        executes: bool = False,
    ) -> None:
        context = fork_context()
        self.args = [str(word) for word in command]
        self.pipes: list[Connection] = []
        if terminal is None:
            files = [Connection(os.open(os.devnull, os.O_RDONLY), writable=False)]
            for _ in range(1 if merged else 2):
                ours, theirs = context.Pipe(duplex=False)
                self.pipes.append(ours)
                files.append(theirs)
        else:
            files = [Connection(os.dup(terminal))]
        environment = dict(os.environ if env is None else env)
        arguments = (self.args, str(cwd or Path.cwd()), environment, files, executes)
        self._process = context.Process(target=_execute, args=arguments)
        self._process.start()
        for file in files:
            file.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit status; minus its number for a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and all that it started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    def communicate(self, timeout: float = 120.0) -> list[str]:
        """Read until the last process that could write is gone; return standard output and standard error, if apart."""
        deadline, found = time.monotonic() + timeout, {pipe: b"" for pipe in self.pipes}
        with selectors.DefaultSelector() as selector:
            for pipe in self.pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    self.kill()
                    raise subprocess.TimeoutExpired(self.args, timeout, *found.values())
                for key, _ in ready:
                    pipe: Any = key.fileobj
                    piece = os.read(pipe.fileno(), 65536)
                    found[pipe] += piece
                    if not piece:
                        selector.unregister(pipe)
                        pipe.close()
        self.wait(max(deadline - time.monotonic(), 1.0))
        return [written.decode() for written in found.values()]


def run_script(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    merged: bool = False,
    executes: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as `subprocess.run` does; after so many seconds its process group is killed."""
    process = Forked(command, cwd=cwd, env=env, merged=merged, executes=executes)
    written = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), *written)


def run_ranks(
    command: Sequence[str | Path],
    processes: int = 2,
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in several processes of one node, as `torchrun --nproc-per-node` does; rank 0 is the first."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "ROLE_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    base = dict(os.environ if env is None else env) | common
    ranks = []
    for rank in map(str, range(processes)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
        ranks.append(Forked(command, cwd=cwd, env=base | own))
    with ThreadPoolExecutor(processes) as pool:
        written = list(pool.map(lambda process: process.communicate(timeout), ranks))
    return [
        subprocess.CompletedProcess(process.args, process.wait(), *texts)
        for process, texts in zip(ranks, written, strict=True)
    ]


class _OfLauncher:
    """A process of Lightning's launcher, with the methods of `subprocess.Popen` that `WatchedLauncher` calls.

    The forked script is not its parent, and the group that a terminal interrupts is another.

    Args:
        command: An interpreter, and what it executes.
        env: Its environment.
        cwd: Its folder, that of the caller if None.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> None:
        assert command[0] == sys.executable, command
        context, files = fork_context(), [Connection(os.dup(number)) for number in range(3)]
        arguments = (list(command[1:]), cwd or str(Path.cwd()), dict(env), files, False)
        self._process = context.Process(target=_execute, args=arguments)
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # or the fork imports the script before it executes it
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = script
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # or it is awaited
        self._lock = threading.Lock()
        for file in files:
            file.close()

    def poll(self) -> int | None:
        with self._lock:  # two threads ask, and the status can be read once
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        if not wait([self._process.sentinel], timeout) or (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._process.pid or 0, signal.SIGKILL)


def _execute(
    command: list[str], folder: str, environment: dict[str, str], files: list[Connection], executes: bool
) -> None:
    """Become the process, from a fork of the server."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only
    from lightning.pytorch.strategies.launchers import subprocess_script

    from support.runs.preloaded import PATH

    os.setsid()
    for number in range(3):
        os.dup2(files[min(number, len(files) - 1)].fileno(), number)
    for file in files:
        file.close()
    _open_streams()
    is_module = command[0] == "-m"
    beside = folder if is_module else str(Path(folder, command[0]).resolve().parent)
    own = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    enter(folder, environment, [beside, *own, *PATH])
    sys.argv[:] = command[1:] if is_module else command
    rank_zero_only.rank = _get_rank() or 0  # Lightning reads it at import
    multiprocessing.set_start_method(None, force=True)  # the server set its own for what it forks
    if not executes:
        subprocess_script.subprocess = SimpleNamespace(Popen=_OfLauncher)  # type: ignore[assignment]
    if is_module:
        sys.modules.pop(command[1], None)  # `runpy` warns of a module that has been imported
        os._exit(_end(lambda: runpy.run_module(command[1], run_name="__main__", alter_sys=True)))
    os._exit(_end(lambda: runpy.run_path(command[0], run_name="__main__")))


def _open_streams() -> None:
    """As an interpreter opens them: lines are written at once to a terminal and to standard error."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            buffering=1 if number == 2 or os.isatty(number) else -1,
            errors="backslashreplace" if number == 2 else None,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end(execute: Callable[[], object]) -> int:
    """Execute the script and what an interpreter does at its end; return the exit status."""
    status, interrupted = 0, False
    try:
        execute()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed at the other end
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF
