"""Conversion of programs of torch.export by other packages, each in a virtual environment of its own.

The converters need versions of packages that would fight with those here, and hundreds of megabytes. An environment is
made once, in the cache folder of the user; it has the packages of this environment, torch among them, wherever it has
none of its own, so that it reads the programs that are written here.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....common.errors import UserError
from ....common.files import cache_folder, remove, replacing
from ....common.messages import say

REQUIREMENTS = {
    # Its newest release; says that it was tested up to torch 2.7, and converts the programs of 2.15.
    "coreml": "coremltools==9.0",
    # The release whose runtime was compared with torch 2.14 and 2.15; another one may need another torch.
    "executorch": "executorch==1.5.1",
}
"""The package that converts to each format."""
_SUFFIXES = {"coreml": ".mlpackage", "executorch": ".pte"}


class Job(NamedTuple):
    """A program to convert.

    Attributes:
        name: name of the files, such as "image".
        program: takes one row of each input.
        inputs: rows of each input by name, [N, ...], which the converted program runs if it can run here.
        output: name of the output.
    """

    name: str
    program: torch.export.ExportedProgram
    inputs: Mapping[str, torch.Tensor]
    output: str


def convert(jobs: Sequence[Job], folder: Path, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """Convert programs, and return what the converter says of each by name.

    Args:
        jobs: the programs, each for one row of its inputs.
        folder: an existing folder, where the converted programs are written.
        format: a key of `REQUIREMENTS`.
        dtype: precision that the converted programs compute in.

    Returns:
        Of "coreml" the `inputs` and the `output` as shapes by name, the number of `weights` of the program and those
        that the converted program does not hold (`missing`); of "executorch" the `features` of the inputs, [N, E].

    Raises:
        UserError: If the environment cannot be made, or the conversion fails.
    """
    python = environment(format)
    work = folder / ".conversion"
    work.mkdir()
    towers = {}
    for job in jobs:
        torch.export.save(job.program, work / f"{job.name}.pt2")
        torch.save(dict(job.inputs), work / f"{job.name}.pt")
        towers[job.name] = job.output
    (work / "job.json").write_text(json.dumps({"dtype": str(dtype).removeprefix("torch."), "towers": towers}))
    script = Path(__file__).with_name(f"to_{format}.py")
    # -P: the script's folder is no place to import from. The environment's own packages come before inherited ones.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(python), "-P", str(script), str(work)],
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(
            f"Expected {REQUIREMENTS[format]} to convert the {' and the '.join(towers)} tower, got "
            f"{_last_line(done.stderr)!r}: nothing is written; export in another layout."
        )
    results: dict[str, Any] = torch.load(work / "results.pt", weights_only=True)
    for job in jobs:
        file = f"{job.name}{_SUFFIXES[format]}"
        (work / file).rename(folder / file)
    remove(work)
    return results


def environment(format: str) -> Path:
    """Return the Python of the environment that converts to a format, which is made at the first call.

    Raises:
        UserError: If it cannot be made: without an index of packages, without space, or without Python's `venv`.
    """
    requirement = REQUIREMENTS[format]
    folder = environment_folder(format)
    python = folder / "bin" / "python"
    if python.exists():
        return python
    say(f"Installing {requirement} once, into {folder}, an environment of its own.")
    with replacing(folder) as staged:
        _run([sys.executable, "-m", "venv", str(staged)], requirement)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(staged)}))
        (packages / "inherited.pth").write_text("".join(f"{path}\n" for path in _package_folders()))
        # Called as a module: the scripts name the folder as it is called until it is complete.
        install = ["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", requirement]
        _run([str(staged / "bin" / "python"), *install], requirement)
    return python


def environment_folder(format: str) -> Path:
    """Return the folder of an environment: another one for another Python, another torch or other inherited folders."""
    inherited = hashlib.sha256("\n".join(_package_folders()).encode()).hexdigest()[:8]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    name = f"{REQUIREMENTS[format].replace('==', '-')}-{python}-torch{torch.__version__}-{inherited}"
    return cache_folder() / "converters" / name


def _package_folders() -> list[str]:
    """Return the folders of installed packages that this process imports from."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]


def _run(words: Sequence[str], requirement: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"Expected an environment with {requirement}, which `python -m venv` and pip make, got "
            f"{_last_line(done.stderr or done.stdout)!r}: check the connection to the package index and the free space."
        )


def _last_line(text: str) -> str:
    """Return the line of a program's messages that says why it failed: pip's last error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]
