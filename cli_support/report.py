"""What the user sees when a run stops: one sentence for a mistake that has one, the traceback for everything else."""

import contextlib
import functools
import linecache
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from .command_line import PACKAGE_ROOT, UsageError

DEBUG_VARIABLE = "VLIGHTNING_DEBUG"
# Raised on purpose, with a sentence, by this package and by Lightning.
SPOKEN = (ValueError, FileNotFoundError, RuntimeError, TypeError, KeyError, OSError)
# Third-party messages that no user can act on.
NOISE = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The number of training batches .* is smaller than the logging interval",
    r".*jsonargparse.*deprecat",
    # Teachers are in eval mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # Modules look labels up there while they are on the host; no datamodule here has a hook of its own for it.
    r"You have overridden `on_before_batch_transfer`",
    # A run that goes on in a folder of its own keeps its own best checkpoint.
    r"The dirpath has changed from",
    # A run that goes on in its own folder, which rundir.py has checked.
    r"Checkpoint directory .* exists and is not empty",
)
# The same in log messages, by logger.
LOGGED_NOISE = {
    "lightning.pytorch.utilities.rank_zero": ("litlogger", "litmodels"),
    "lightning.pytorch.trainer.connectors.checkpoint_connector": ("`weights_only` was not set",),
}


@contextlib.contextmanager
def readable_errors(debug: bool = False, program: str = "vlightning") -> Iterator[None]:
    """Turn mistakes into `vlightning: error: <sentence>` and an exit status; leave defects their traceback.

    Exit status 2 for what was typed, 1 for a run that stopped. `--debug`, or the environment variable
    `VLIGHTNING_DEBUG=1`, keeps every traceback.

    Args:
        debug: Whether to keep every traceback.
        program: What stands before the sentence.

    Raises:
        SystemExit: In place of a mistake that one sentence describes.
    """
    try:
        yield
    except Exception as error:
        sentence = spoken(error)
        if debug or sentence is None or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            raise
        usage = isinstance(error, UsageError)
        hint = "" if usage or program != "vlightning" else " (--debug shows the traceback)"
        if _is_first_to_say(sentence):
            sys.stderr.write(f"{program}: error: {sentence}{hint}\n")
        raise SystemExit(2 if usage else 1) from None


def _is_first_to_say(sentence: str) -> bool:
    """Whether no other process of the run has said it yet, as far as they can still be asked."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    try:
        return int(dist.distributed_c10d._get_default_store().add(f"vlightning said: {sentence}", 1)) == 1
    except RuntimeError:  # the process that keeps the store has ended
        return True


def spoken(error: Exception) -> str | None:
    """The sentence of an exception that was raised on purpose, or None for a defect.

    On purpose means: by a `raise` statement of this package or of Lightning, here or in a loader's worker process. A
    `ValueError` from the inside of a library is a defect whose traceback is needed.

    Args:
        error: The exception.
    """
    text = " ".join(str(error).split())
    if isinstance(error, (UsageError, MisconfigurationException)):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if _is_out_of_memory(error):
        return _out_of_memory(text, frames)
    if (
        isinstance(error, ModuleNotFoundError)
        and frames
        and _raised_on_purpose(frames[-1].filename, frames[-1].lineno or 0)
    ):
        return _missing_package(error)
    if not isinstance(error, SPOKEN):
        return None
    if "Error(s) in loading state_dict for" in text:
        return _mismatch(str(error))
    if re.match(r"Caught \w+ in DataLoader worker process", text):
        places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        on_purpose = bool(places) and _raised_on_purpose(places[-1][0], int(places[-1][1]))
        return " ".join(re.split(r"\n[\w.]+: ", str(error))[-1].split()) if on_purpose else None
    if frames and "jsonargparse" in Path(frames[-1].filename).parts and isinstance(error.__cause__, Exception):
        return spoken(error.__cause__)  # a constructor's error, wrapped: the model may also be left out
    if not frames or not _raised_on_purpose(frames[-1].filename, frames[-1].lineno or 0):
        return None
    return text.strip("'\"") if isinstance(error, KeyError) else text


def _raised_on_purpose(filename: str, line: int) -> bool:
    """Whether the line is a `raise` statement of this package or of Lightning."""
    path = Path(filename)
    libraries = "site-packages" in path.parts[len(PACKAGE_ROOT.parts) :]  # an environment inside the repository
    ours = path.is_relative_to(PACKAGE_ROOT) and not libraries
    return (ours or "lightning" in path.parts) and linecache.getline(filename, line).lstrip().startswith("raise ")


def _is_out_of_memory(error: Exception) -> bool:
    allocating = r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA out of memory"
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or (isinstance(error, RuntimeError) and re.search(allocating, str(error)) is not None)


def _out_of_memory(text: str, frames: traceback.StackSummary) -> str:
    """What ran out of memory, and what to make smaller; classes are built by jsonargparse, everything else is not."""
    asked = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", text)
    amount = ""
    if asked is not None:
        gib = float(asked[1]) * {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2**10}[asked[2]]
        amount = f", for {gib:,.3g} GiB more" if gib < 1000 else f", for {gib:,.0f} GiB more"
    if any("jsonargparse" in Path(frame.filename).parts for frame in frames):
        part = "data" if any("datamodules" in Path(frame.filename).parts for frame in frames) else "model"
        return (
            f"There is not enough memory to build the {part}{amount}: lower its sizes (--{part}.help NAME lists the "
            "arguments), or use a machine with more memory."
        )
    return (
        f"Memory ran out{amount}: lower data.batch_size, or model.micro_batch_size where the module has it, or use a "
        "machine with more memory."
    )


def _missing_package(error: Exception) -> str:
    """Lightning's word for a class whose package is not installed, with what to do."""
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
    """Torch's page about a checkpoint that does not fit the module, in one sentence."""
    module = re.search(r"loading state_dict for (\w+)", message)
    found = []
    for what, pattern in (
        ("missing", r"Missing key\(s\)[^:]*: ([^\n]*)"),
        ("unexpected", r"Unexpected key\(s\)[^:]*: ([^\n]*)"),
    ):
        keys = [key for line in re.findall(pattern, message) for key in re.findall(r'"([^"]+)"', line)]
        if keys:
            found.append(f"{len(keys)} weights are {what} ({keys[0]}{', ...' if len(keys) > 1 else ''})")
    sizes = re.findall(
        r"size mismatch for ([^:]+): copying a param with shape (.*?) from checkpoint, the shape in", message
    )
    shapes = re.findall(r"current model is (.*?)\.(?:\n|$)", message)
    if sizes:
        now = f", in the module {shapes[0]}" if shapes else ""
        found.append(f"{len(sizes)} differ in size ({sizes[0][0]}: in the checkpoint {sizes[0][1]}{now})")
    name = module.group(1) if module else "the module"
    return (
        f"The checkpoint does not fit {name}: {'; '.join(found)}; give the model.init_args that it was trained "
        "with, or none, which takes them from the checkpoint."
    )


def tell(sentence: str) -> None:
    """Print one line of warning, once for all processes.

    Args:
        sentence: The line.
    """
    if getattr(rank_zero_only, "rank", 0) == 0:
        sys.stderr.write(f"vlightning: warning: {sentence}\n")


def say(sentence: str) -> None:
    """Print one line of the run's own account, once for all processes.

    Args:
        sentence: The line.
    """
    if getattr(rank_zero_only, "rank", 0) == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.write(f"{sentence}\n")


def quiet() -> None:
    """Silence third-party messages that no user can act on."""
    for pattern in NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"jsonargparse|lightning")
    for name, words in LOGGED_NOISE.items():
        logging.getLogger(name).addFilter(functools.partial(_says_more, words))


def _says_more(words: tuple[str, ...], record: logging.LogRecord) -> bool:
    """Whether a log message is none of those that hold one of the words."""
    return not any(word in record.getMessage() for word in words)
