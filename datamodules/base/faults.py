"""Results of reading samples: usable samples, faults, and the counts of faults per split."""

from __future__ import annotations

import contextlib
import logging
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...common.errors import UserError
from ...common.shown import shown

log = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]

EMPTY_CAPTION = "empty caption"
NAMED_PER_CAUSE = 5
CHECK_FROM = 200
"""Number of samples read before the share of unusable samples is checked within an epoch."""


class Fault(NamedTuple):
    """Cause why a sample cannot be used, and the name of the sample in messages."""

    cause: str
    name: str


class BadSample(Exception):
    """Raised for a sample that cannot be used; carries the `Fault`."""

    def __init__(self, cause: str, name: str) -> None:
        super().__init__(cause, name)
        self.fault = Fault(cause, name)


class BadDataError(UserError):
    """Raised if the share of unusable samples is too large."""


ROW_ERRORS = (
    ValueError,  # base of the errors of Unicode, JSON and Arrow
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,  # JSON that is nested too deeply
    MemoryError,
    OSError,
    EOFError,
    struct.error,
    zlib.error,
)
"""Errors that the content of a row can raise in the code that reads it.

Programming errors (NameError, AttributeError, AssertionError) are not included: they end the run with a traceback, as
do errors of transforms, which are applied outside of `reading`.
"""


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise errors that the content of one row causes as `BadSample`, with the text of the error in the name.

    Raises:
        BadSample: If one of `ROW_ERRORS` is raised; the cause includes its type, as in
            "unreadable (RecursionError)".
    """
    try:
        yield
    except ROW_ERRORS as error:
        raise BadSample(*unreadable(error, name)) from None


def unreadable(error: BaseException, name: str) -> Fault:
    """Return the fault of a row whose content raised an error."""
    return Fault(f"unreadable ({type(error).__name__})", f"{name} ({str(error)[:200]})")


@dataclass
class Outcome:
    """Result of reading one item: a sample or None, the number of samples read, and their faults."""

    sample: Any
    num_read: int = 0
    faults: list[Fault] = field(default_factory=list)


class Collated(NamedTuple):
    """A batch with its counts, of which the loader yields only the batch; notes are about usable samples."""

    batch: Batch | None
    num_read: int
    faults: list[Fault]
    notes: Sequence[Fault] = ()


class Account:
    """Count the unusable samples of one split by cause, log the first of each cause, and end the run above a share.

    The counts are updated in the main process; loader workers send the faults with each batch.

    Args:
        split: name of the split, for messages.
        max_bad_share: largest share of unusable samples with which the run continues.
        action: treatment of unusable samples, for messages.
    """

    def __init__(self, split: str, max_bad_share: float, action: str = "replaced") -> None:
        self.split = split
        self.max_bad_share = max_bad_share
        self.action = action
        self.num_read = 0
        self.causes: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self._logged = 0

    def update(self, num_read: int, faults: list[Fault]) -> None:
        """Add the counts of one batch.

        Raises:
            BadDataError: If the share of unusable samples is above the limit.
        """
        self.num_read += num_read
        for cause, name in faults:
            self.causes[cause] += 1
            if self.causes[cause] <= NAMED_PER_CAUSE:
                log.warning("%s sample %s is unusable (%s): %s", self.split, shown(name), cause, self.action)
            if self.causes[cause] == NAMED_PER_CAUSE:
                log.warning("Further %s samples with the cause '%s' are counted, not logged", self.split, cause)
        if self.num_read >= CHECK_FROM:
            self.check()

    def remark(self, notes: Iterable[Fault]) -> None:
        """Count notes about usable samples, and log the first of each kind."""
        for kind, name in notes:
            self.remarks[kind] += 1
            if self.remarks[kind] == 1:
                log.warning("%s sample %s: %s; further samples are counted, not logged", self.split, shown(name), kind)

    def check(self) -> None:
        """Check the share of unusable samples.

        Raises:
            BadDataError: If the share is above the limit.
        """
        if self.causes.total() > self.max_bad_share * self.num_read:
            self.fail()

    def end_of_pass(self) -> None:
        """Log the number of unusable samples if it has changed, and check their share.

        Raises:
            BadDataError: If the share is above the limit.
        """
        if self.causes.total() > self._logged:
            self._logged = self.causes.total()
            log.warning("Unusable %s samples so far: %s", self.split, self.summary())
        for kind, count in self.remarks.items():
            log.info("%s samples with '%s' so far: %d of %d", self.split, kind, count, self.num_read)
        self.check()

    def fail(self) -> None:
        """End the run.

        Raises:
            BadDataError: In all cases.
        """
        raise BadDataError(
            f"Expected at most {self.max_bad_share:.2%} unusable {self.split} samples (data.max_bad_share), got "
            f"{self.summary()}: correct the data, or increase the limit."
        )

    def summary(self) -> str:
        """Return the counts, as in `3 of 200 (truncated: 2, missing file: 1)`."""
        causes = ", ".join(f"{cause}: {count}" for cause, count in self.causes.most_common())
        return f"{self.causes.total()} of {self.num_read} ({causes})"
