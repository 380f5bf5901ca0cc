"""What the user sees when a run stops: one sentence for a mistake that has one, the traceback for everything else.

The rule: a `UserError` and Lightning's `MisconfigurationException` are for the user wherever they are raised. So is a
`ValueError`, `FileNotFoundError` or `FileExistsError` whose last frame is in this package or in Lightning. Errors of
torch that users meet (memory, a checkpoint that does not fit, a missing package) get a sentence here. All other
exceptions are defects.
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..common.errors import UserError
from ..common.private_api import default_store
from .command_line import PACKAGE_ROOT, UsageError

DEBUG_VARIABLE = "VLIGHTNING_DEBUG"
_FOR_USERS = (ValueError, FileNotFoundError, FileExistsError)
_OWN_FOLDERS = ("callbacks", "cli_support", "common", "datamodules", "lightning_modules", "metrics")


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
        if debug or text is None or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            raise
        usage = isinstance(error, UsageError)
        if _is_first_to_report(text):
            sys.stderr.write(f"vlightning: error: {text}{'' if usage else ' (--debug shows the traceback)'}\n")
        raise SystemExit(2 if usage else 1) from None


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn every `UserError` into a `UsageError`, while the command line is read."""
    try:
        yield
    except UserError as error:
        raise UsageError(str(error)) from error


def _is_first_to_report(text: str) -> bool:
    """Whether no other process of the run has reported it, as far as they can still be asked."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    try:
        return int(default_store().add(f"vlightning reported: {text}", 1)) == 1
    except RuntimeError:  # the process that keeps the store has ended
        return True


def sentence(error: Exception) -> str | None:
    """Return the sentence for an exception that is meant for the user, or None for a defect."""
    text = " ".join(str(error).split())
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, ModuleNotFoundError) and files and _is_ours(files[-1]):
        return _missing_package(error)
    out_of_memory = isinstance(error, RuntimeError) and re.search(_NO_MEMORY, text)
    if out_of_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return _out_of_memory(text, files)
    if "Error(s) in loading state_dict for" in text:
        return _mismatch(str(error))
    if re.match(r"Caught \w+ in DataLoader worker process", text):
        files = re.findall(r'File "([^"]+)", line \d+', text)
        text = " ".join(re.split(r"\n[\w.]+: ", str(error))[-1].split())
    if isinstance(error, (UserError, MisconfigurationException)):
        return text
    if files and "jsonargparse" in Path(files[-1]).parts and isinstance(error.__cause__, Exception):
        return sentence(error.__cause__)  # a constructor's error, wrapped: the model may also be left out
    return text if isinstance(error, _FOR_USERS) and files and _is_ours(files[-1]) else None


def _is_ours(filename: str) -> bool:
    """Whether a file belongs to this package or to Lightning."""
    path = Path(filename)
    return "lightning" in path.parts or any(path.is_relative_to(PACKAGE_ROOT / folder) for folder in _OWN_FOLDERS)


_NO_MEMORY = r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA out of memory"


def _out_of_memory(text: str, files: list[str]) -> str:
    """Return what ran out of memory and what to make smaller; only models and data are built by jsonargparse."""
    asked = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", text)
    amount = ""
    if asked is not None:
        gib = float(asked[1]) * {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2**10}[asked[2]]
        amount = f", for {gib:,.3g} GiB more" if gib < 1000 else f", for {gib:,.0f} GiB more"
    if any("jsonargparse" in Path(file).parts for file in files):
        part = "data" if any("datamodules" in Path(file).parts for file in files) else "model"
        return (
            f"There is not enough memory to build the {part}{amount}: lower its sizes (--{part}.help NAME lists the "
            "arguments), or use a machine with more memory."
        )
    return (
        f"Memory ran out{amount}: lower data.batch_size, or model.memory.micro_batch_size where the module has it, or "
        "use a machine with more memory."
    )


def _missing_package(error: Exception) -> str:
    """Return Lightning's sentence about a class whose package is not installed, with the remedy."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    owner = tb.tb_frame.f_locals.get("self") if tb is not None else None
    name = type(owner).__name__ if owner is not None else "What was configured"
    found = re.search(r"'([\w.-]+)([^']*)'", str(error)) or re.search(r"pip install (?:-U )?([\w.-]+)()", str(error))
    if found is None:
        return f"{name} needs a package that is not installed: {' '.join(str(error).split())}"
    return (
        f"{name} needs the package {found[1]!r}, which is not installed: run pip install '{found[1]}{found[2]}', or "
        f"leave {name} out."
    )


def _mismatch(message: str) -> str:
    """Return torch's page about a checkpoint that does not fit the module as one sentence."""
    found = []
    for what in ("Missing", "Unexpected"):
        lines = re.findall(rf"{what} key\(s\)[^:]*: ([^\n]*)", message)
        if keys := [key for line in lines for key in re.findall(r'"([^"]+)"', line)]:
            found.append(f"{len(keys)} weights are {what.lower()} ({keys[0]}{', ...' if len(keys) > 1 else ''})")
    size = r"size mismatch for ([^:]+): copying a param with shape (.*?) from checkpoint, the shape in"
    shapes = re.findall(r"current model is (.*?)\.(?:\n|$)", message)
    if sizes := re.findall(size, message):
        now = f", in the module {shapes[0]}" if shapes else ""
        found.append(f"{len(sizes)} differ in size ({sizes[0][0]}: in the checkpoint {sizes[0][1]}{now})")
    module = re.search(r"loading state_dict for (\w+)", message)
    return (
        f"The checkpoint does not fit {module[1] if module else 'the module'}: {'; '.join(found)}; give the "
        "model.init_args that it was trained with, or none, which takes them from the checkpoint."
    )
