r"""Measure claims: do their missing runs, and append a line of JSON for each to `docs/results/<claim>.jsonl`.

    python benchmarks/proof/run.py cocord shre --jobs 2 --hours 8 --data ~/data

Finished runs are skipped, and interrupted ones go on from their last checkpoint, so the same command may be given
again, also on another machine with the same files of results. A run that fails writes a line to `failures.jsonl` in the
work folder and does not stop the others; the next command tries it again. A claim is a file of
`benchmarks/proof/claims/`, or a Python file with an attribute `CLAIM`.

Networks of this size leave a GPU idle. Under NVIDIA's MPS the kernels of several jobs run at the same time; without
it only those of one process do:

    nvidia-cuda-mps-control -d
    python benchmarks/proof/run.py mmlg --jobs 15 --accelerator gpu --data ~/data
"""

import argparse
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # As a script: the folder above, whose modules the processes of the runs import, in place of this one.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from proof.plan import Folders
from proof.results import RESULTS


def main(words: list[str] | None = None) -> int:
    """Do the missing runs, and return the status: 1 if some failed.

    Args:
        words: arguments; by default those of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="+", metavar="CLAIM", help="claims, what decides most first")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one thread; 2")
    parser.add_argument(
        "--hours", type=float, help="number of hours after which running trainings stop with a checkpoint"
    )
    parser.add_argument("--data", default=os.environ.get("PROOF_DATA"), help="folder of the data sets ($PROOF_DATA)")
    work = Path(os.environ.get("PROOF_WORK", "runs/proof"))
    parser.add_argument("--work", type=Path, default=work, help="folder of checkpoints ($PROOF_WORK; runs/proof)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; docs/results")
    parser.add_argument("--accelerator", default="cpu", help="the Trainer's; cpu")
    options = parser.parse_args(words)
    if options.data is None:
        parser.error("Expected the folder of the data sets, got none: give --data or set PROOF_DATA.")

    from proof.driver import Driver

    data = str(Path(options.data).resolve())
    folders = Folders(data, options.work.resolve(), options.results.resolve(), options.accelerator)
    driver = Driver(options.claims, folders, options.jobs, options.hours)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: driver.stop())
    return int(driver.work() > 0)


if __name__ == "__main__":
    sys.exit(main())
