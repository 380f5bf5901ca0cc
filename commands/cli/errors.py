"""Output for exceptions: one sentence for an error that the user can fix, the traceback for a defect.

The user can fix a `UserError` and Lightning's `MisconfigurationException` wherever they are raised, and a `ValueError`,
`FileNotFoundError` or `FileExistsError` that is raised by Lightning or by `metrics/`, which imports nothing of this
package. `commands/cli/errors.py` has sentences for some errors of torch. All other exceptions are defects.
"""

import contextlib
import errno
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ...callbacks.distributed.collectives import is_first_to
from ...common.errors import UsageError, UserError
from ...common.shown import shown
from .listing import PACKAGE_ROOT


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
        text = shown(text)
        usage = isinstance(error, UsageError)
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
    if message := out_of_memory(error, files) or mismatch(error):
        return message
    if not isinstance(error, UserError) and (message := disk_full(error)):
        return message
    text = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", text):
        files = [Path(file) for file in re.findall(r'File "([^"]+)", line \d+', text)]
        text = re.split(r"\n[\w.]+: ", text)[-1]
    if files and "jsonargparse" in files[-1].parts and isinstance(error.__cause__, Exception):
        # jsonargparse wraps the error of a constructor.
        return sentence(error.__cause__) or failed_constructor(text)
    by_metrics = bool(files) and files[-1].is_relative_to(PACKAGE_ROOT / "metrics")
    kinds = (ValueError, FileNotFoundError, FileExistsError) if by_lightning or by_metrics else ()
    return " ".join(text.split()) if isinstance(error, (UserError, MisconfigurationException, *kinds)) else None


def failed_constructor(text: str) -> str | None:
    """Return which class of the user's own raised an error when it was made, by jsonargparse's error about its type.

    Where an option may also be null, jsonargparse has a paragraph for each type, the innermost first.
    """
    if not text.startswith("Does not validate against any of the Union subtypes"):
        return None
    reasons = re.findall(r"^ *- (?!Does not validate|Expected a <class)(.+)", text, re.M)
    path = re.search(r"Given value: Namespace\(class_path='([\w.]+)'", text)
    if not reasons or path is None or path[1].startswith("vlightning."):
        return None
    return f"{path[1]} raised an error when it was made: {reasons[0]}"


_NO_MEMORY = r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA out of memory"


def out_of_memory(error: Exception, files: list[Path]) -> str | None:
    """Return what ran out of memory and what to make smaller; None for other errors."""
    text = " ".join(str(error).split())
    if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(_NO_MEMORY, text)):
        return None
    request = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", text)
    amount = ""
    if request is not None:
        gib = float(request[1]) * {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2**10}[request[2]]
        amount = f", for {gib:,.3g} GiB more" if gib < 1000 else f", for {gib:,.0f} GiB more"
    if any("jsonargparse" in file.parts for file in files):  # it builds only models and data
        section = "data" if any("datamodules" in file.parts for file in files) else "model"
        return (
            f"There is not enough memory to build the {section}{amount}: lower its sizes (--{section}.help NAME lists "
            "the arguments), or use a machine with more memory."
        )
    return (
        f"Memory ran out{amount}: lower data.batch_size, or model.memory.micro_batch_size where the module has it, or "
        "use a machine with more memory."
    )


def disk_full(error: BaseException | None) -> str | None:
    """Return what was wrong with a disk that could not be written; None for other errors.

    The libraries that write loggers' files and copies of data raise the error of the system, or another one because of
    it.
    """
    cause = error
    while cause is not None and getattr(cause, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if cause is None:
        return None
    return (
        f"Expected room for the files of the run, got an error of the disk ({cause}): make room, or choose another "
        "folder with --trainer.logger.save_dir, and with --data.cache_dir for copies of data."
    )


def missing_package(error: ModuleNotFoundError) -> str:
    """Return which class needs a package that is not installed, by Lightning's error, and the remedy."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    owner = tb.tb_frame.f_locals.get("self") if tb is not None else None
    name = type(owner).__name__ if owner is not None else "What was configured"
    text = " ".join(str(error).split())
    package = re.search(r"'([\w.-]+)([^']*)'", text) or re.search(r"pip install (?:-U )?([\w.-]+)()", text)
    if package is None:
        return f"{name} needs a package that is not installed: {text}"
    return (
        f"{name} needs the package {package[1]!r}, which is not installed: run pip install "
        f"'{package[1]}{package[2]}', or leave {name} out."
    )


def mismatch(error: Exception) -> str | None:
    """Return torch's page about a checkpoint that does not fit the module as one sentence; None for other errors."""
    message = str(error)
    if "Error(s) in loading state_dict for" not in message:
        return None
    differences = []
    for mistake in ("Missing", "Unexpected"):
        lines = re.findall(rf"{mistake} key\(s\)[^:]*: ([^\n]*)", message)
        if keys := [key for line in lines for key in re.findall(r'"([^"]+)"', line)]:
            differences.append(
                f"{len(keys)} weights are {mistake.lower()} ({keys[0]}{', ...' if len(keys) > 1 else ''})"
            )
    size = r"size mismatch for ([^:]+): copying a param with shape (.*?) from checkpoint, the shape in"
    shapes = re.findall(r"current model is (.*?)\.(?:\n|$)", message)
    if sizes := re.findall(size, message):
        now = f", in the module {shapes[0]}" if shapes else ""
        differences.append(f"{len(sizes)} differ in size ({sizes[0][0]}: in the checkpoint {sizes[0][1]}{now})")
    module = re.search(r"loading state_dict for (\w+)", message)
    return (
        f"The checkpoint does not fit {module[1] if module else 'the module'}: {'; '.join(differences)}; give the "
        "model.init_args that it was trained with, or none, which takes them from the checkpoint."
    )
