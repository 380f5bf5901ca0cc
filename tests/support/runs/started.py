"""The threads and child processes that a test started, without those that tests before it left in this process."""

import multiprocessing
import threading
from multiprocessing.process import BaseProcess


class Started:
    """Remembers what ran when it was made; an abandoned loader of another test may keep threads and workers."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(multiprocessing.active_children())

    def threads(self, name: str) -> list[threading.Thread]:
        """Return the living threads with a text in their names."""
        return [thread for thread in threading.enumerate() if name in thread.name and thread not in self._threads]

    def children(self) -> list[BaseProcess]:
        """Return the living children of `multiprocessing`, such as loader workers."""
        return [child for child in multiprocessing.active_children() if child not in self._children]
