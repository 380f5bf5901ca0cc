"""Messages to the user, printed once for all processes, and filters for messages of other packages."""

import contextlib
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from .shown import shown

# Messages of other packages that do not help the user.
NOISE = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The number of training batches .* is smaller than the logging interval",
    r".*jsonargparse.*deprecat",
    # Teachers are in eval mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # Modules look up labels in this hook while they are on the host; no datamodule of this package has the hook.
    r"You have overridden `on_before_batch_transfer`",
    # A run that resumes in another folder has its own best checkpoint.
    r"The dirpath has changed from",
    # A run that resumes in its own folder, which was checked before.
    r"Checkpoint directory .* exists and is not empty",
)
# Such log messages, by logger.
LOGGED_NOISE = {
    "lightning.pytorch.utilities.rank_zero": ("litlogger", "litmodels"),
    "lightning.pytorch.trainer.connectors.checkpoint_connector": ("`weights_only` was not set",),
}


_PACKAGE = Path(__file__).resolve().parents[1]


def warn(line: str) -> None:
    """Print one line of warning, once for all processes."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        sys.stderr.write(_warning(line))


def _warning(text: str) -> str:
    return f"vlightning: warning: {shown(' '.join(text.split()))}\n"


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """Let Python print the warnings of this package as `warn` does, without the file and the line of code."""
    before = warnings.formatwarning

    def short(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if Path(filename).is_relative_to(_PACKAGE):
            return _warning(str(message))
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = before


def say(line: str) -> None:
    """Print one line about the run, once for all processes."""
    if getattr(rank_zero_only, "rank", 0) == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.write(f"{shown(line)}\n")
        sys.stdout.flush()


def table(values: Mapping[str, float], chance: Mapping[str, float] | None = None) -> str:
    """Return names, values and, if any is known, chance levels in columns, under a header.

    The names are in order with their numbers counted: r1, r5, r10.
    """
    width = max(map(len, [*values, "metric"]))
    levels = {name: _readable(level) for name, level in (chance or {}).items() if name in values}
    names = sorted(values, key=lambda name: [(int(n or -1), text) for n, text in re.findall(r"(\d+)|(\D+)", name)])
    rows = [("metric", "value", "chance")]
    rows += [(name, _readable(values[name]), levels.get(name, "")) for name in names]
    lines = (f"{name:<{width}}  {value:>8}" + f"  {level:>8}" * bool(levels) for name, value, level in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _readable(value: float) -> str:
    """Return four significant digits, and never fewer than those of a whole number."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def silence_noise() -> None:
    """Silence messages of other packages that do not help the user."""
    for pattern in NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"jsonargparse|lightning")
    for name, words in LOGGED_NOISE.items():
        logging.getLogger(name).addFilter(functools.partial(_is_no_noise, words))


def _is_no_noise(words: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not any(word in record.getMessage() for word in words)
