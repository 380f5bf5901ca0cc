"""Text files: encoding, JSON, lines."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.errors import UserError

ENCODING = "utf-8-sig"
"""Encoding of all text: UTF-8, with or without the byte order mark that programs on Windows write."""


@contextlib.contextmanager
def utf8(path: Path) -> Iterator[None]:
    """Explain how to convert a file that is read in the context if it has another encoding.

    Raises:
        UserError: it has.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected UTF-8 in {str(path)!r}, got the byte 0x{error.object[error.start]:02x}: save the file as UTF-8 "
            "(Excel: CSV UTF-8), or convert a file from Windows by `iconv -f CP1252 -t UTF-8`."
        ) from error


def whole(digits: str) -> int | str:
    """Parse an integer of JSON; one of thousands of digits stays text."""
    # Python refuses to parse more digits, and would refuse the whole file because of the id of one image.
    return int(digits) if len(digits) < 4300 else digits


def parsed(text: str, path: Path) -> Any:
    """Parse the JSON text of a file; integers of thousands of digits stay text.

    Raises:
        UserError: it is not valid, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=whole)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"Expected valid JSON in {str(path)!r}, got another content ({error}): correct it.") from error


def read_texts(file: str) -> list[str]:
    """Read the lines of a text file, including empty lines, so that the index of a text is that of its line.

    Raises:
        UserError: the file does not exist or is not UTF-8.
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
