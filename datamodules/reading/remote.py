"""Files on object storage and web servers, by URL: `s3://`, `gs://`, `https://` and others that `fsspec` knows.

Reads are ranges of bytes whose length is checked, so that a connection that is cut off is noticed, and are tried again
after errors. Keys and addresses come from where the libraries look for them, such as `AWS_ACCESS_KEY_ID` and
`AWS_ENDPOINT_URL`, or from the configuration files of `fsspec`, so that no config and no checkpoint holds them.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import posixpath
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any, TypeVar
from urllib.parse import unquote

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from ...common.errors import UserError
from ...common.shown import shown
from ...common.urls import REMOVED, hidden, whole
from ..base.decode import MAX_BYTES
from ..base.faults import BadSample

log = logging.getLogger(__name__)
Result = TypeVar("Result")

RETRIES = 5
"""Default number of times that a failed read is tried again: at most 16 seconds of waiting in all."""
_retries = ContextVar("retries", default=RETRIES)
FIRST_WAIT = 0.5
"""Seconds before the first retry, which double for each further one up to `LONGEST_WAIT`."""
LONGEST_WAIT = 30.0
BLOCK = 4 * 2**20
"""Bytes of a range when a file is read in order."""
URL_START = r"^[a-zA-Z][a-zA-Z0-9+.-]*://"
_URL = re.compile(URL_START)
_RANGE = re.compile(r"(.*)#bytes=(\d+)-(\d+)", re.DOTALL)
_PACKAGES = {"s3": "vlightning[s3]", "s3a": "vlightning[s3]", "gs": "vlightning[gcs]", "gcs": "vlightning[gcs]"}
_FINAL = (IsADirectoryError, PermissionError, ImportError, NotImplementedError)
_DEFECTS = (NameError, AttributeError, AssertionError, TypeError)


class RemoteError(UserError, OSError):
    """Raised for a file by URL that cannot be read, also not by the last retry."""


class NoRemoteFile(RemoteError, FileNotFoundError):
    """Raised for a URL without a file."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL."""
    return _URL.match(os.fspath(path)) is not None


def without_query(path: str) -> str:
    """Return a path, or a URL without its query, which may hold slashes and dots."""
    return path.partition("?")[0] if is_remote(path) else path


def suffix_of(path: str) -> str:
    """Return the suffix of a path or URL in lower case, such as ".tar", without the query of a URL."""
    return os.path.splitext(without_query(path))[1].lower()


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    File systems are kept by `fsspec`, those of a forked loader worker apart from its parent's.

    Raises:
        UserError: If no installed package knows the protocol.
    """
    scheme = url.partition("://")[0].lower()
    try:
        system: tuple[Any, str] = url_to_fs(url)
        return system
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(scheme)
        advice = (
            f"run `pip install {package}`" if package else "use a protocol that fsspec knows, or install its package"
        )
        raise UserError(f"Expected a package that reads {scheme}://, got none ({error}): {advice}.") from error


@contextmanager
def retrying(retries: int) -> Iterator[None]:
    """Try failed reads this many times again inside the context, where a call does not say otherwise."""
    token = _retries.set(retries)
    try:
        yield
    finally:
        _retries.reset(token)


def current_retries() -> int:
    """Return the number of the innermost `retrying`, which threads do not inherit."""
    return _retries.get()


def attempted(url: str, retries: int | None, read: Callable[[Any, str], Result]) -> Result:
    """Call a function with the file system and the path of a URL, which gets its secrets here, again after errors.

    The waits double from half a second to at most half a minute, each shortened by up to a half at random, so that the
    workers of a run do not come back at once.

    Args:
        url: the file.
        retries: number of further calls; None for that of `retrying`.
        read: the function.

    Raises:
        NoRemoteFile: If there is no such file; not tried again.
        RemoteError: If the last call fails, or access is denied.
        UserError: If the secrets of the URL are missing.
    """
    retries = current_retries() if retries is None else retries
    address = whole(url)
    is_secret = address != url
    for attempt in range(retries + 1):
        try:
            return read(*file_system(address))
        except (UserError, *_DEFECTS):
            raise
        except FileNotFoundError as error:
            raise NoRemoteFile(f"Expected a file at {url!r}, got none: correct the address.") from (
                None if is_secret else error  # whose text has the whole URL, as a traceback would
            )
        except Exception as error:  # each package has its own errors
            if isinstance(error, _FINAL) or attempt == retries:
                times = "" if isinstance(error, _FINAL) else f" {attempt + 1} time(s)"
                raise RemoteError(
                    f"Expected to read {url!r}, got an error{times} ({type(error).__name__}: {_first_line(error)}): "
                    "check the address, the keys and the network, or increase data.read_retries; a run resumes from "
                    "its last checkpoint."
                ) from (None if is_secret else error)
            wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.SystemRandom().uniform(0.5, 1)
            log.info("Reading %s failed (%s); trying again in %.1f s", shown(url), _first_line(error), wait)
            time.sleep(wait)
    raise AssertionError


def _first_line(error: Exception) -> str:
    return shown((str(error).strip() or "no message").splitlines()[0])[:200]


def read_range(url: str, start: int, stop: int, retries: int | None = None) -> bytes:
    """Read bytes of a file; errors as in `attempted`."""

    def read(system: Any, path: str) -> bytes:
        data: bytes = system.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"{len(data)} bytes instead of {stop - start}")
        return data

    return attempted(url, retries, read) if stop > start else b""


def size_of(path: str, retries: int | None = None) -> int:
    """Return the size of a file, local or by URL, in bytes.

    Raises:
        OSError: If there is no such file, or it cannot be read.
        UserError: If a server does not tell the size.
    """
    if not is_remote(path):
        return os.path.getsize(path)
    size = attempted(path, retries, lambda system, inside: system.info(inside)["size"])
    if size is None:
        raise RemoteError(f"Expected the size of {path!r}, got none from its server: use another server, or a copy.")
    return int(size)


def stamp_of(path: str, retries: int | None = None) -> str:
    """Return a text that changes with a file, local or by URL; files of web servers are taken as fixed.

    Raises:
        OSError: If there is no such file, or it cannot be read.
    """
    if is_remote(path):
        return f"{path}\0{attempted(path, retries, lambda system, inside: system.ukey(inside))}"
    state = os.stat(path)
    return f"{path}\0{state.st_mtime_ns}\0{state.st_size}"


def read_url(path: str, name: str, retries: int | None = None) -> bytes:
    """Read a file by URL, or some bytes of a file by a URL of `url_of_bytes`, as the image of a row.

    Raises:
        BadSample: If it cannot be read; the cause is "missing file", "too large" or "unreadable".
    """
    try:
        url = path
        start = 0
        if span := _RANGE.fullmatch(path):
            url = span[1]
            start, stop = int(span[2]), int(span[3])
        else:
            stop = size_of(path, retries)
        if stop - start > MAX_BYTES:
            raise BadSample("too large", name)
        return read_range(url, start, stop, retries)
    except FileNotFoundError:
        raise BadSample("missing file", name) from None
    except RemoteError:
        raise BadSample("unreadable", name) from None


def url_of_bytes(url: str, start: int, size: int) -> str:
    """Return the URL of some bytes of a file, for `read_url`."""
    return f"{url}#bytes={start}-{start + size}"


class RemoteFile(io.RawIOBase):
    """A file by URL that is read in ranges; at most `BLOCK` bytes at once, with `retries` as in `attempted`.

    Raises:
        OSError: If there is no such file, or it cannot be read.
    """

    def __init__(self, url: str, retries: int | None = None) -> None:
        super().__init__()
        # The context of this thread: Arrow reads in other threads.
        self.retries = current_retries() if retries is None else retries
        self.url = url
        self.size = size_of(url, self.retries)
        self.position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read, which reads nothing by itself."""
        self.position = max(0, offset + (0, self.position, self.size)[whence])
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer and return their number."""
        view = memoryview(buffer).cast("B")
        stop = min(self.position + min(len(view), BLOCK), self.size)
        data = read_range(self.url, self.position, stop, self.retries)
        view[: len(data)] = data
        self.position += len(data)
        return len(data)


def open_file(path: str | os.PathLike[str], retries: int | None = None, block: int = BLOCK) -> IO[bytes]:
    """Open a file, local or by URL, to read bytes.

    Args:
        path: the file.
        retries: as in `attempted`.
        block: bytes that are read ahead of a file by URL.

    Raises:
        OSError: If there is no such file, or it cannot be read.
    """
    if not is_remote(path):
        return open(path, "rb")
    return io.BufferedReader(RemoteFile(os.fspath(path), retries), block)


def find_files(url: str, suffixes: tuple[str, ...], retries: int | None = None) -> list[str]:
    """Return the URLs of a file, of the files that match a pattern, or of those in a folder that have a suffix.

    Of a folder, the files with the first suffix that it has are returned.

    Raises:
        UserError: If there is none, or the storage cannot be read.
    """
    scheme = url.partition("://")[0]
    pattern = glob.has_magic(url) and not scheme.startswith("http")

    def read(system: Any, path: str) -> list[str]:
        if pattern:
            return list(system.glob(path))
        return [] if suffix_of(url) in suffixes else list(system.find(path))

    if not pattern and suffix_of(url) in suffixes:
        return [url]
    try:
        names = sorted(
            name if is_remote(name) else f"{scheme}://{name.lstrip('/')}" for name in attempted(url, retries, read)
        )
    except FileNotFoundError:
        names = []
    if REMOVED in url:
        names = [hidden(name) for name in names]  # with the user info of the folder
    if pattern and names:
        return names
    for suffix in suffixes:
        if chosen := [name for name in names if suffix_of(name) == suffix]:
            return chosen
    raise UserError(f"Expected files at {url!r}, got none of {', '.join(suffixes)}: correct the address.")


def joined(root: str, path: str) -> str:
    """Return a path of a row under the root of its source, which may be a URL; a whole path is not changed."""
    if not is_remote(root):
        return os.path.join(root, path)
    return path if is_remote(path) else f"{root.rstrip('/')}/{path}"


def is_inside(path: str, root: str) -> bool:
    """Return whether a path, or URL, starts with a folder after ".." is resolved.

    Servers and libraries decode percent signs, some of them twice, and some take a backslash for a slash, or leave out
    what follows a semicolon: a URL is inside if it is so in each of these readings, with its query and without.
    """
    if is_remote(root):
        scheme, _, root_address = root.partition("://")
        other, _, inner = path.partition("://")
        folder = f"{root_address.rstrip('/')}/"
        return scheme == other and all(
            posixpath.normpath(reading).startswith(folder)
            for address in (inner, re.split(r"[?#]", inner, maxsplit=1)[0])
            for reading in _readings(address)
        )
    return os.path.normpath(path).startswith(os.path.join(root, ""))


def _readings(address: str) -> Iterator[str]:
    """Yield an address, and what is read from it with percent signs decoded, as often as there are any."""
    while True:
        yield address
        yield re.sub(r";[^/]*", "", address.replace("\\", "/"))
        decoded = unquote(address)
        if decoded == address:
            return
        address = decoded
