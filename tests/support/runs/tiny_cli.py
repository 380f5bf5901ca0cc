"""The command line with the tiny classes imported, for tests that start processes."""

import atexit
import sys
from pathlib import Path

from torch.distributed import is_initialized

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.methods import tiny  # noqa: F401
from vlightning.cli import main

if __name__ == "__main__":
    atexit.register(lambda: print(f"Process group at the end: {is_initialized()}"))
    main()
