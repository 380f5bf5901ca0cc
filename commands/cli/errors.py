"""Output for exceptions: one sentence for an error that the user can fix, the traceback for a defect.

The user can fix a `UserError` and Lightning's `MisconfigurationException` wherever they are raised, and a `ValueError`,
`FileNotFoundError` or `FileExistsError` that is raised by Lightning or by `metrics/`, which imports nothing of this
package. `commands/cli/library_errors.py` has sentences for some errors of torch. All other exceptions are defects.
"""

import contextlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ...callbacks.distributed.collectives import is_first_to
from ...common.errors import UserError
from ...common.shown import shown
from .configs import PACKAGE_ROOT
from .library_errors import disk_full, mismatch, missing_package, out_of_memory


class UsageError(UserError):
    """Raised for a command line that cannot be run as typed; the exit status is 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Raise each `UserError` in the context as a `UsageError`.

    Raises:
        UsageError: If the context raises a `UserError`.
    """
    try:
        yield
    except UserError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def readable_errors(debug: bool = False) -> Iterator[None]:
    """Print an error that the user can fix as `vlightning: error: <sentence>`, and exit; raise defects unchanged.

    Args:
        debug: Whether to raise all exceptions unchanged, as the environment variable `VLIGHTNING_DEBUG=1` does.

    Raises:
        SystemExit: If the user can fix the error; the status is 2 for the command line, and 1 for a run that stopped.
    """
    in_threads = threading.excepthook
    # TensorBoard writes in a thread, whose error this thread raises at its next write.
    threading.excepthook = lambda error: None if disk_full(error.exc_value) else in_threads(error)
    try:
        yield
    except Exception as error:
        text = sentence(error)
        if debug or text is None or os.environ.get("VLIGHTNING_DEBUG", "0") not in ("", "0"):
            raise
        text, usage = shown(text), isinstance(error, UsageError)
        if is_first_to(f"report: {text}"):
            sys.stderr.write(f"vlightning: error: {text}{'' if usage else ' (--debug shows the traceback)'}\n")
        raise SystemExit(2 if usage else 1) from None
    finally:
        threading.excepthook = in_threads


def sentence(error: Exception) -> str | None:
    """Return the sentence for an exception that the user can fix, or None for a defect."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    by_lightning = bool(files) and "lightning" in files[-1].parts
    if isinstance(error, ModuleNotFoundError) and files and (by_lightning or files[-1].is_relative_to(PACKAGE_ROOT)):
        return missing_package(error)
    if found := out_of_memory(error, files) or mismatch(error):
        return found
    if not isinstance(error, UserError) and (found := disk_full(error)):
        return found
    text = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", text):
        files = [Path(file) for file in re.findall(r'File "([^"]+)", line \d+', text)]
        text = re.split(r"\n[\w.]+: ", text)[-1]
    if files and "jsonargparse" in files[-1].parts and isinstance(error.__cause__, Exception):
        return sentence(error.__cause__)  # jsonargparse wraps the error of a constructor
    by_metrics = bool(files) and files[-1].is_relative_to(PACKAGE_ROOT / "metrics")
    kinds = (ValueError, FileNotFoundError, FileExistsError) if by_lightning or by_metrics else ()
    return " ".join(text.split()) if isinstance(error, (UserError, MisconfigurationException, *kinds)) else None
