"""Atomic writing of files and folders, and removal of unfinished files of killed writers.

A file or folder is written under an unfinished name beside its target and renamed when it is complete. The unfinished
name holds the machine, the process number and the start time of its writer, so that `clear_leftovers` removes the files
of ended writers only. On the same machine the process is looked up; a reused process number is recognized by its start
time. Whether a writer on another machine or in another container that shares the file system is running is unknown
(file locks do not help: several network file systems keep them per machine, or have none), so its files are removed
only after `FOREIGN_AGE` without a change.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError

UNFINISHED, REPLACED = ".incomplete-", ".replaced-"
"""Prefixes of the names of an unfinished file or folder, and of an old folder between its replacement and removal."""
FOREIGN_AGE = 24 * 3600.0
"""Seconds; longer than SLURM commonly suspends a job that it continues later."""

_UMASK = os.umask(0)
os.umask(_UMASK)
_OWNER = re.compile(r"by-(?P<machine>[0-9a-f]{12})-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-(?P<rest>.*)", re.DOTALL)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


class WriteError(UserError, OSError):
    """A file or folder could not be written."""


@contextmanager
def replacing(target: str | Path, keep_existing: bool = False) -> Iterator[Path]:
    """Write a file or folder atomically.

    Yields a path beside the target where nothing exists yet. Write a file or a folder there: it gets the target's name
    once the block ends, after its content is on the disk. If the block raises, the target stays as it was. The folder
    of the target is made, and what killed writers left in it is removed.

    Args:
        target: Final path.
        keep_existing: If another process has made the target in the meantime, keep that one and drop this one.

    Raises:
        WriteError: If it cannot be written, or a file stands where its folder should be.
    """
    target = Path(target)
    staged = unfinished_beside(target)
    with writing(target):
        _make_folder(target.parent)
    try:
        clear_leftovers(target.parent)
        yield staged
        _allow_reading(staged)
        sync(staged)
        if not (keep_existing and target.exists()):
            swap_in(staged, target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, WriteError) or _os_error(error) is None:
            raise
        raise _write_error(target, error) from error
    finally:
        remove(staged)


def _allow_reading(path: Path) -> None:
    """Give files the permissions of the process' other new files; safetensors (0.8) lets only their owner read."""
    for file in [path, *path.rglob("*")]:
        if file.is_file() and not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(0o666 & ~_UMASK)


def cache_folder() -> Path:
    """Return the folder of what can be computed or downloaded again, `~/.cache/vlightning` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlightning"


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file or folder that nobody changes under a second name: by hard links, or else as a copy of the same age.

    Raises:
        WriteError: If it cannot be written.
    """

    def put(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(old, new)

    with replacing(target) as staged:
        if source.is_dir():
            shutil.copytree(source, staged, copy_function=put)
        else:
            put(str(source), str(staged))


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Name the target in the error of a failed write, an OSError or torch's RuntimeError.

    Raises:
        WriteError: If the block raises one of these.
    """
    try:
        yield
    except WriteError:
        raise
    except (OSError, RuntimeError) as error:
        raise _write_error(target, error) from error


def check_free(target: Path) -> None:
    """Check that a path is free for a new file or folder: that it does not exist, or is an empty folder.

    Raises:
        UserError: If the path is taken.
    """
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise UserError(
            f"Expected a new name or an empty folder, got {str(target)!r}, which exists: remove it or give another."
        )


def unfinished_beside(target: Path) -> Path:
    """Return a new name in the folder of a target, for what is renamed to the target when it is complete.

    The name does not contain the target's: Lightning takes every file with `ckpt_` in its name for a checkpoint.
    """
    return target.with_name(f"{UNFINISHED}{_owner()}{uuid.uuid4().hex}")


def replaced_beside(target: Path) -> Path:
    """Return the name of an old folder between its replacement and its removal."""
    return target.with_name(f"{REPLACED}{_owner()}{target.name}")


def original_path(replaced: Path) -> Path:
    """Return the path that a folder with a name from `replaced_beside` had before."""
    name = replaced.name.removeprefix(REPLACED)
    owner = _OWNER.fullmatch(name)
    return replaced.with_name(owner["rest"] if owner else name)


def swap_in(staged: Path, target: Path) -> None:
    """Rename a complete file or folder to its final name, then remove the old file or folder of that name.

    A file replaces a file in one step. A folder takes two steps, since no folder can be renamed onto one that is not
    empty: a process that is killed in between leaves the old folder under a name that begins with `.replaced-`, and
    `clear_leftovers` gives that folder its name back. If two processes do this at once, the later rename is kept.

    Raises:
        OSError: If it cannot be renamed; the target is then unchanged.
    """
    if not (staged.is_dir() or target.is_dir()):
        os.replace(staged, target)
        _sync_path(target.parent)
        return
    old = replaced_beside(target)
    while True:
        remove(old)
        with suppress(FileNotFoundError):  # no old folder, or another process has just renamed it
            os.rename(target, old)
        try:
            os.rename(staged, target)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TAKEN and staged.exists():
                continue  # another process has renamed its folder to the target since
            if old.exists():
                os.rename(old, target)
            raise
        break
    _sync_path(target.parent)
    remove(old)


def clear_leftovers(folder: Path) -> None:
    """Remove unfinished files of killed processes in a folder.

    A replaced folder whose original path is free gets its name back. Files of running processes, and files
    that cannot be removed, are kept.
    """
    with suppress(OSError):
        for staged in folder.glob(f"{UNFINISHED}*"):
            if _is_left(staged, UNFINISHED):
                with suppress(OSError):
                    remove(staged)
        for old in folder.glob(f"{REPLACED}*"):
            if not _is_left(old, REPLACED):
                continue
            if original_path(old).exists():
                remove(old)
            else:
                with suppress(FileNotFoundError):  # another process has just renamed it
                    os.rename(old, original_path(old))


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or each file of a folder, is on the disk."""
    for entry in (path, *path.rglob("*")) if path.is_dir() else (path,):
        if not entry.is_symlink():
            _sync_path(entry)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((path for path in (folder, *folder.parents) if path.is_file()), folder)
        raised = WriteError(f"Expected the folder {folder}, got the file {file}: move the file or give another path.")
        raised.errno = error.errno
        raise raised from error


def _write_error(target: Path, error: Exception) -> WriteError:
    cause = _os_error(error)
    kept = "what was there before is unchanged" if target.exists() else "nothing was written"
    message = f"{target} could not be written ({cause or error}); {kept}: check the free space and the permissions."
    raised = WriteError(message)
    raised.errno = cause.errno if cause is not None else None
    return raised


def _os_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an error: torch reports a failed write as a RuntimeError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _sync_path(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems refuse it for folders
            raise
    finally:
        os.close(descriptor)


def _is_left(path: Path, prefix: str) -> bool:
    """Return whether the writer of an unfinished or replaced path has ended, certainly or very probably."""
    owner = _OWNER.fullmatch(path.name.removeprefix(prefix))
    if owner is not None and owner["machine"] == _machine():
        return not _is_alive(int(owner["pid"]), owner["start"])
    return _unchanged_for(path) > FOREIGN_AGE


def _unchanged_for(path: Path) -> float:
    """Return the seconds since the last change by the file system's clock, since clocks of machines may differ."""
    clock = unfinished_beside(path)
    try:
        clock.touch()
        now = clock.stat().st_ctime
        return now - max(entry.lstat().st_ctime for entry in (path, *path.rglob("*")))
    except OSError:  # its writer has just finished, or the folder is read-only
        return 0.0
    finally:
        with suppress(OSError):
            clock.unlink(missing_ok=True)


def _owner() -> str:
    """Return the part of a name that identifies this process."""
    return f"by-{_machine()}-{os.getpid()}-{_started(os.getpid()) or 0}-"


@cache
def _machine() -> str:
    """Return 12 hexadecimal digits for where a process number is valid: this boot of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{boot}{os.readlink('/proc/self/ns/pid')}").hex[:12]
    except OSError:  # not Linux: no other process can be looked up, and this one removes its own files
        return uuid.uuid4().hex[:12]


def _is_alive(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return _started(pid) in (start, None)


def _started(pid: int) -> str | None:
    """Return a process's start in ticks since the boot, "" for a process that has ended, None if unknown."""
    try:
        # The program's name stands in parentheses and may contain parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint, if the checkpoint is still where it was written."""
    path = checkpoint.absolute()
    return relative_to_here(path.parent.parent if path.parent.name == "checkpoints" else path.parent)


def relative_to_here(path: Path) -> Path:
    """Return a path as a user would write it: relative if it is below the working folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of `key: value` lines; an empty one gives no keys.

    Raises:
        UserError: If it cannot be read, is not YAML, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"Expected valid YAML in {path}{where}, got an error ({problem}): correct the file.") from error
    if not isinstance(content, dict | None):
        raise UserError(f"Expected `key: value` lines in {path}, got a {type(content).__name__}: correct the file.")
    return {str(key): value for key, value in (content or {}).items()}
