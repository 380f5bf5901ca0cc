"""Names of unfinished files and folders that say which process writes them, so that only a dead one's are removed.

Two runs may write into one folder, and so may `vlightning.convert` and a training. What a killed process has left is
removed by the next save, but what another process is still writing is not. A name says which process of which machine
made it. On this machine the process can be looked for; a number that was given to another process since is told apart
by the time at which that one started. Of another machine, or another container, with the same file system nothing can
be proved: locks are no proof either, since several network file systems keep them on one machine, or have none. What
they make is taken for left only when nothing has changed in it for `FOREIGN_AGE`.
"""

import contextlib
import os
import re
import shutil
import uuid
from functools import cache
from pathlib import Path

STAGED, REPLACED = ".incomplete-", ".replaced-"
"""How the names begin that something has until it is complete, and that an old folder has until it is removed."""
FOREIGN_AGE = 24 * 3600.0
"""Seconds; long enough for a job that SLURM suspends for another one, and goes on with."""

_OWNER = re.compile(r"by-(?P<machine>[0-9a-f]{12})-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-(?P<rest>.*)", re.DOTALL)


def staged_beside(target: Path) -> Path:
    """Returns a new name in the folder of a target, for what gets the target's name when it is complete.

    It is not made from the target's name: Lightning takes every file with `ckpt_` in it for one of its own.
    """
    return target.with_name(f"{STAGED}{_owner()}{uuid.uuid4().hex}")


def replaced_beside(target: Path) -> Path:
    """Returns the name that a folder has from when another one takes its place until it is removed."""
    return target.with_name(f"{REPLACED}{_owner()}{target.name}")


def place_of(replaced: Path) -> Path:
    """Returns the place that a folder of such a name had."""
    name = replaced.name.removeprefix(REPLACED)
    owner = _OWNER.fullmatch(name)
    return replaced.with_name(owner["rest"] if owner else name)


def clear_leftovers(folder: Path) -> None:
    """Removes what processes have left in a folder that were killed while they wrote there.

    A folder whose place is still empty gets its name back. Nothing of a process that may be alive is touched.
    """
    for staged in folder.glob(f"{STAGED}*"):
        if _is_left(staged, STAGED):
            remove(staged)
    for old in folder.glob(f"{REPLACED}*"):
        if not _is_left(old, REPLACED):
            continue
        if place_of(old).exists():
            remove(old)
        else:
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                os.rename(old, place_of(old))


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it; does nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_left(path: Path, prefix: str) -> bool:
    """Whether the process that made a file or folder of such a name has certainly, or very probably, ended."""
    owner = _OWNER.fullmatch(path.name.removeprefix(prefix))
    if owner is not None and owner["machine"] == _machine():
        return not _is_alive(int(owner["pid"]), owner["start"])
    return _unchanged_for(path) > FOREIGN_AGE


def _unchanged_for(path: Path) -> float:
    """Seconds since the last change, by the clock of the file system: those of two machines may differ."""
    clock = staged_beside(path)
    try:
        clock.touch()
        now = clock.stat().st_ctime
        return now - max(part.lstat().st_ctime for part in (path, *path.rglob("*")))
    except OSError:  # its owner has just finished, or nothing can be written here
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            clock.unlink(missing_ok=True)


def _owner() -> str:
    """This process, as names begin with it after their prefix."""
    return f"by-{_machine()}-{os.getpid()}-{_started(os.getpid()) or 0}-"


@cache
def _machine() -> str:
    """Twelve hexadecimal digits for what process numbers hold in: this boot of this machine, this container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{boot}{os.readlink('/proc/self/ns/pid')}").hex[:12]
    except OSError:  # no Linux: nothing can be said of any process but this one, which removes its own by itself
        return uuid.uuid4().hex[:12]


def _is_alive(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return _started(pid) in (start, None)


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the boot; an empty string if it has ended, None if it cannot be said."""
    try:
        # The name of the program stands in parentheses, and may hold some itself.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
