"""Lightning's launcher of processes on one node, which does not kill this process without a message."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from ...common.private_api import SubprocessScriptLauncher, set_launcher, set_number_of_threads

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
        set_number_of_threads(self.num_processes)
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
