"""Call a function in a process that ends afterwards."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def by_another_process(function: Callable[[], Any]) -> Any:
    """Call a function in a fork of this process."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(function()))
    process.start()
    answer = answers.get()
    process.join()
    return answer
