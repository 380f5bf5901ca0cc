"""Writing of files while the training goes on."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from .sharded_checkpoint import map_values

_WAITING = 1
"""Writes that may wait when another one is asked for: a validation writes the best and the last checkpoint."""


class BackgroundWriter:
    """Runs jobs one after the other in a thread.

    An error of a job is raised by the next call of a method, in the calling thread.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None

    def ready(self) -> None:
        """Wait until at most one job is unfinished, so that few copies of a checkpoint are in memory."""
        self._finish(_WAITING)

    def submit(self, job: Callable[[], None], even_after_error: bool = True) -> None:
        """Run a job after those before it.

        Args:
            job: what to run.
            even_after_error: whether it runs if one of those before it has failed.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoints")
        self._jobs.append(self._thread.submit(self._run, job, even_after_error))

    def wait(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        try:
            self._finish(0)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def _finish(self, left: int) -> None:
        while len(self._jobs) > left:
            self._jobs.pop(0).result()
        self._jobs = [job for job in self._jobs if not job.done()]
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None], even_after_error: bool) -> None:
        if self._error is not None and not even_after_error:
            return
        try:
            job()
        except BaseException as error:
            self._error = self._error or error


def snapshot(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a checkpoint in main memory, in which tied tensors stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(place: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    whole: dict[str, Any] = map_values(copied, checkpoint)
    return whole
