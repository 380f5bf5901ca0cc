"""Run the command line inside the test process, on the tiny module, and capture its output."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from support.methods import tiny  # noqa: F401  (its classes can now be named in YAML)
from vlightning.cli import main

CONFIG = """\
model: {class_path: TinyModel, init_args: {dim: 5}}
data: {class_path: TinyData, init_args: {batch_size: 8}}
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""


@dataclass
class Ran:
    """Result of a run."""

    status: int
    err: str
    out: str

    @property
    def sentence(self) -> str:
        """The error, after checking that it is one line and nothing else was printed as an error."""
        lines = [line for line in self.err.splitlines() if line.startswith("vlightning: error: ")]
        assert len(lines) == 1, self.err
        assert "usage:" not in self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("vlightning: error: ")


def run(*words: str) -> Ran:
    """Run `vlightning <words>`."""
    err, out, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            status = main([str(word) for word in words]) or 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    sys.stdout.write(out.getvalue())
    sys.stderr.write(err.getvalue())
    return Ran(status, err.getvalue(), out.getvalue())


def export(words: list[str]) -> None:
    """Run `vlightning export <words>` without capturing its output."""
    main(["export", *words])


def convert(words: list[str]) -> None:
    """Run `vlightning convert <words>` without capturing its output."""
    main(["convert", *words])


def tiny_config(folder: Path, name: str = "tiny.yaml", text: str = CONFIG) -> str:
    """Write a config file and return its name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)
