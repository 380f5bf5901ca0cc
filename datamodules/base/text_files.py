"""Reading of text files: encoding, JSON, lines."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import UserError

ENCODING = "utf-8-sig"
"""Encoding of text files: UTF-8, with or without the byte order mark that programs on Windows write."""


@contextlib.contextmanager
def require_utf8(path: str | Path) -> Iterator[None]:
    """Raise decoding errors of a file that is read in the context as errors for the user, with the remedy.

    Raises:
        UserError: If the encoding of the file is not UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected UTF-8 in {str(path)!r}, got the byte 0x{error.object[error.start]:02x}: save the file as UTF-8 "
            "(Excel: CSV UTF-8), or convert a file from Windows by `iconv -f CP1252 -t UTF-8`."
        ) from error


def parse_integer(digits: str) -> int | str:
    """Parse an integer in JSON; an integer of 4300 digits or more stays text."""
    # Python refuses to parse more digits, and so would refuse the whole file because of one image id.
    return int(digits) if len(digits) < 4300 else digits


@dataclass(frozen=True)
class DuplicateKey:
    """What `with_unique_keys` returns for a JSON object that has a key twice."""

    key: str


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any] | DuplicateKey:
    """Return a JSON object as a dict, or its first key that occurs twice, of which a dict would keep the last value."""
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    keys = [key for key, _ in pairs]
    return DuplicateKey(next(key for key in keys if keys.count(key) > 1))


def parse_json(
    text: str, path: str | Path, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parse the JSON text of a file; integers as in `parse_integer`.

    Args:
        text: the text.
        path: the file, for messages.
        object_pairs_hook: as in `json.loads`; None for dicts, which keep the last value of a duplicate key.

    Raises:
        UserError: If the text is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_int=parse_integer, object_pairs_hook=object_pairs_hook)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"Expected valid JSON in {str(path)!r}, got another content ({error}): correct it.") from error


def read_texts(file: str) -> list[str]:
    """Read the lines of a text file, including empty lines, so that the index of a text is the index of its line.

    Raises:
        UserError: If the file does not exist or is not UTF-8.
    """
    try:
        with open(os.path.expanduser(file), encoding=ENCODING) as lines:
            return [line.rstrip("\n") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"Expected a UTF-8 text file with one text per line, got {file!r} ({reason}): correct the path, or give a "
            "list of texts."
        ) from error
