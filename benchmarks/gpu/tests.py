"""The tests of the device: `pytest -m gpu`."""

import subprocess
import sys
from pathlib import Path

from setting import Setting

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run the tests, and write one row for each."""
    setting = Setting.parsed(__doc__)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rA", "-q", "tests/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    sys.stderr.write(done.stdout[-20000:])
    table = setting.table(("test", "result"))
    for line in done.stdout.splitlines():
        word, _, test = line.partition(" ")
        if word in ("PASSED", "FAILED", "SKIPPED", "ERROR"):
            table.row(test.replace("tests/test_gpu.py::", "").replace("|", "/")[:150], word.lower())
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
