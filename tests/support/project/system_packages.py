"""Programs of the system that a test needs: found, installed by `.ci/run`, or done without.

The standard library is enough for it: `.ci/run` installs them before there is anything else.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence

INSTALL_VARIABLE = "VLIGHTNING_TEST_INSTALL"
_APT = ("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::http::Timeout=20")


def find(program: str) -> str | None:
    """Find a program, also a daemon outside of an ordinary user's PATH."""
    return shutil.which(program, path=os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/usr/local/sbin")))


def missing(programs: Sequence[str], packages: Sequence[str]) -> str | None:
    """Return the reason why programs cannot run here, or None.

    With `VLIGHTNING_TEST_INSTALL=1` they are installed where that is possible: root, and a distribution with `apt-get`.
    """
    absent = _absent(programs)
    if not absent:
        return None
    found = f"no {absent} here (packages {', '.join(packages)})"
    if os.environ.get(INSTALL_VARIABLE) != "1":
        return f"{found}, and {INSTALL_VARIABLE} is not 1"
    if os.getuid() != 0 or find("apt-get") is None:
        return f"{found}, and only root installs packages, with apt-get"
    for words in (("update",), ("install", "--no-install-recommends", *packages)):
        try:
            done = subprocess.run(
                [*_APT, *words],
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{found}, and `apt-get {words[0]}` took more than five minutes"
    last = " ".join(done.stderr.split())[-200:]
    return f"{found}, and `apt-get install` failed: {last}" if _absent(programs) else None


def _absent(programs: Sequence[str]) -> str:
    return ", ".join(program for program in programs if find(program) is None)
