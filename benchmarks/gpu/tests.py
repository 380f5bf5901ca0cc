"""The tests of the device, `pytest -m gpu`: golden numbers first."""

import re
import subprocess
import sys
from pathlib import Path

from setting import Setting

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/lightning_modules/albef/test_golden.py",
    "tests/lightning_modules/networks/test_cifar.py",
    "tests/lightning_modules/mobileclip/test_models.py",
    "tests/test_gpu.py",
)
"""With the marker `gpu`."""
_RESULT = re.compile(r"^(?:tests/)?(\S*::.+?) (PASSED|FAILED|SKIPPED|ERROR)")


def main() -> None:
    """Run the tests, and write a row for each as it ends."""
    setting = Setting.parsed(__doc__)
    table = setting.table(("test", "result"))
    words = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words += ["-k", setting.only.replace(",", " or ")] if setting.only else []
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words, *FILES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        sys.stderr.write(line)
        if (found := _RESULT.match(line)) is not None:
            table.row(found[1].replace("|", "/")[:150], found[2].lower())
        elif line.startswith("ERROR ") and "::" not in line:  # of a file, whose packages are missing
            table.row(line.split()[1], "not collected")
    sys.exit(running.wait())


if __name__ == "__main__":
    main()
