"""The tests of the device, `pytest -m gpu`: golden numbers first."""

import re
import subprocess
import sys
from pathlib import Path

from setting import Setting, has

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "tests/lightning_modules/albef/test_golden.py": "torch",
    "tests/lightning_modules/networks/test_cifar.py": "torch",
    "tests/lightning_modules/mobileclip/test_models.py": "open_clip",
    "tests/guarantees/faults/test_gpu.py": "torch",
}
"""Files with the marker `gpu`, and the package that each needs."""
_RESULT = re.compile(r"^(?:tests/)?(\S*::.+?) (PASSED|FAILED|SKIPPED|ERROR)")


def main() -> None:
    """Run the tests, and write a row for each as it ends."""
    setting = Setting.parsed(__doc__)
    table = setting.table(("test", "result"))
    words = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words += ["-k", setting.only.replace(",", " or ")] if setting.only else []
    for file, package in FILES.items():
        if not has(package):
            table.row(file.removeprefix("tests/"), f"left out: {package} is missing")
    words += [file for file, package in FILES.items() if has(package)]
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
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
        elif line.startswith("ERROR ") and "::" not in line:
            table.row(line.split()[1], "not collected")
    sys.exit(running.wait())


if __name__ == "__main__":
    main()
