"""What the user sees when a run stops: one sentence for a mistake that has one, the traceback for everything else.

The rule: a `UserError` and Lightning's `MisconfigurationException` are for the user wherever they are raised, and so is
a `ValueError`, `FileNotFoundError` or `FileExistsError` that Lightning raises, or `metrics/`, which imports nothing of
this package. Errors of torch that users meet get the sentences of `common/library_errors.py`. All other exceptions are
defects.
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..callbacks.distributed.collectives import is_first_to
from ..common.configs import PACKAGE_ROOT
from ..common.errors import UserError
from ..common.library_errors import mismatch, missing_package, out_of_memory


class UsageError(UserError):
    """The command line cannot be run as typed; the exit status is 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn every `UserError` into a `UsageError`, while the command line is read."""
    try:
        yield
    except UserError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def readable_errors(debug: bool = False) -> Iterator[None]:
    """Turn mistakes into `vlightning: error: <sentence>` and an exit status; leave defects their traceback.

    `--debug`, or the environment variable `VLIGHTNING_DEBUG=1`, keeps every traceback.

    Raises:
        SystemExit: In place of a mistake: status 2 for the command line as typed, 1 for a run that stopped.
    """
    try:
        yield
    except Exception as error:
        text = sentence(error)
        if debug or text is None or os.environ.get("VLIGHTNING_DEBUG", "0") not in ("", "0"):
            raise
        usage = isinstance(error, UsageError)
        if is_first_to(f"report: {text}"):
            sys.stderr.write(f"vlightning: error: {text}{'' if usage else ' (--debug shows the traceback)'}\n")
        raise SystemExit(2 if usage else 1) from None


def sentence(error: Exception) -> str | None:
    """Return the sentence for an exception that is meant for the user, or None for a defect."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    lightnings = bool(files) and "lightning" in files[-1].parts
    if isinstance(error, ModuleNotFoundError) and files and (lightnings or files[-1].is_relative_to(PACKAGE_ROOT)):
        return missing_package(error)
    if found := out_of_memory(error, files) or mismatch(error):
        return found
    text = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", text):
        files = [Path(file) for file in re.findall(r'File "([^"]+)", line \d+', text)]
        text = re.split(r"\n[\w.]+: ", text)[-1]
    if files and "jsonargparse" in files[-1].parts and isinstance(error.__cause__, Exception):
        return sentence(error.__cause__)  # a constructor's error, wrapped: the model may also be left out
    metrics = bool(files) and files[-1].is_relative_to(PACKAGE_ROOT / "metrics")
    kinds = (ValueError, FileNotFoundError, FileExistsError) if lightnings or metrics else ()
    return " ".join(text.split()) if isinstance(error, (UserError, MisconfigurationException, *kinds)) else None
