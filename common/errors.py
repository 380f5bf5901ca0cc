"""Errors that the user can fix."""

from .shown import shown


class UserError(Exception):
    """An error that the user can fix; the command line prints the message as one sentence, without a traceback.

    The message has the form "Expected ..., got ...: do ...". It becomes one line without secrets of URLs.
    """

    def __init__(self, message: str = "") -> None:
        lines = [shown(line) for line in message.splitlines()]
        # torch raises the error of a loader worker again with its traceback as the message.
        of_worker = message.startswith("Caught ") and "Original Traceback (most recent call last):" in lines
        super().__init__("\n".join(lines) if of_worker else " ".join(line.strip() for line in lines))


class UsageError(UserError):
    """Raised for a command line that cannot be run as typed; the exit status is 2."""
