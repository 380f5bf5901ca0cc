"""Build the wheel once for each test session, from a clean copy of the sources."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Left-overs of earlier builds and runs, and folders that the wheel does not hold.
NOT_COPIED = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "lightning_logs", "tests", "benchmarks"
)


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder; needs no network."""
    shutil.copytree(ROOT, folder / "source", ignore=NOT_COPIED)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "source"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path) -> Path:
    """Unpack a wheel beside itself: what a type checker can follow, unlike an editable install."""
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@functools.lru_cache(maxsize=1)
def _session() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="vlightning-wheel-")


@functools.lru_cache(maxsize=1)
def built_wheel() -> Path:
    """The wheel of this test session."""
    return build_wheel(Path(_session().name))


@functools.lru_cache(maxsize=1)
def unpacked_wheel() -> Path:
    """The content of the wheel of this test session."""
    return unpack(built_wheel())


# Libraries are not followed: most of the time would go into torch.
_SETTINGS = """\
[mypy]
follow_imports = skip
ignore_missing_imports = True
[mypy-vlightning.*]
follow_imports = normal
"""


def run_mypy(*words: str, folder: Path) -> subprocess.CompletedProcess:
    """Run mypy in a folder, seeing the built wheel."""
    (folder / "mypy.ini").write_text(_SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *words]
    environment = {**os.environ, "MYPYPATH": str(unpacked_wheel())}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
