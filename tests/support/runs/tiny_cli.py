"""The command line with the tiny classes imported, for tests that start processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.methods import tiny  # noqa: F401
from vlightning.cli import main

if __name__ == "__main__":
    main()
