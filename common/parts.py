"""Parts of the shards that a command writes, for processes that start by themselves, such as the tasks of an array."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import UserError


@dataclass(frozen=True)
class Part:
    """One of several parts of a list of shards.

    Args:
        index: Number of the part, from 0.
        count: Number of parts.
    """

    index: int
    count: int

    def of(self, shards: Iterable[int]) -> list[int]:
        """Return the shards of this part; which they are depends on their numbers only."""
        return [number for number in shards if number % self.count == self.index]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_part(text: str | None, option: str) -> Part:
    """Return the part that an option names, such as `3/128`; all shards for None.

    Args:
        text: The value of the option.
        option: Its name, for messages.

    Raises:
        UserError: If the text has another form, or there is no such part.
    """
    if text is None:
        return Part(0, 1)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(
            f"Expected a part such as 0/4, the first of four, or 3/4, the last, for {option}, got {text!r}: correct it."
        )
    return Part(int(match[1]), int(match[2]))
