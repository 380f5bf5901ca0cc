"""Files of results: one line of JSON for each finished run."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def read_lines(file: Path) -> list[Line]:
    """Return the lines of a file, without a last one that an interruption left incomplete; none without the file."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


def key_of(line: Line) -> tuple[str, str, float | None, int]:
    """Return what names the run of a line, as `Run.key`."""
    return line["variant"], line["budget"], line["learning_rate"], line["seed"]


def append_line(file: Path, line: Line) -> bool:
    """Append a line on disk unless its run has one; several processes may do so at once.

    Args:
        file: the file; made if there is none.
        line: the line.

    Returns:
        Whether it was appended.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    content = (json.dumps(line) + "\n").encode()
    with file.open("ab+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        if "variant" in line and key_of(line) in {key_of(other) for other in read_lines(file)}:
            return False
        opened.seek(0)
        text = opened.read()
        opened.truncate(text.rfind(b"\n") + 1)  # a line that an interruption left incomplete
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    return True


@contextlib.contextmanager
def only_process(folder: Path) -> Iterator[bool]:
    """Hold a folder for this process until its end; yield whether no other process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
