"""Run a tutorial and write its page with the outputs: `python docs/site/tutorials.py search_albef`.

A tutorial is a notebook kept as text, in jupytext's percent format: `# %%` begins a cell of code, `# %% [markdown]` one
of text; `jupytext --to notebook docs/tutorials/search_albef.py` makes a notebook of it. The site shows the page that is
written here, so that it is built without running a tutorial. The images are matplotlib's figures.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent.parent
FOLDER, IMAGES = DOCS / "tutorials", DOCS / "images" / "tutorials"


class Cell(NamedTuple):
    """A cell: text or code, and whether it sets the sizes that a test makes smaller."""

    code: bool
    source: str
    sizes: bool


class Output(NamedTuple):
    """What a cell of code has printed, and the figures that it has drawn, as PNG."""

    text: str
    figures: list[bytes]


def cells(name: str) -> list[Cell]:
    """Read the cells of a tutorial."""
    parts = re.split(r"^# %%(.*)\n", (FOLDER / f"{name}.py").read_text(encoding="utf-8"), flags=re.M)[1:]
    found = []
    for head, source in zip(parts[::2], parts[1::2], strict=True):
        code = "[markdown]" not in head
        text = source if code else re.sub(r"^# ?", "", source, flags=re.M)
        found.append(Cell(code, text.strip(), "parameters" in head))
    return found


def run(name: str, **sizes: Any) -> list[Output]:
    """Run the cells of code in the current folder; return the output of each.

    Args:
        name: the tutorial.
        **sizes: values in place of those that the cell tagged "parameters" sets.

    Raises:
        KeyError: If that cell sets no such value.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "tutorial"}
    found = []
    plt.close("all")  # of the caller, or they would count as the first cell's
    for number, cell in enumerate(cell for cell in cells(name) if cell.code):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(cell.source, f"{name}, cell {number}", "exec"), names)
        if cell.sizes:
            for size, value in sizes.items():
                if size not in names:
                    raise KeyError(size)
                names[size] = value
        figures = []
        for figure in plt.get_fignums():
            drawn = io.BytesIO()
            plt.figure(figure).savefig(drawn, dpi=80, facecolor="white", bbox_inches="tight")
            figures.append(drawn.getvalue())
        plt.close("all")
        found.append(Output(said.getvalue().rstrip(), figures))
    return found


def page(name: str, outputs: list[Output] | None) -> str:
    """Return the page of a tutorial: text, code, and below each cell of code its output, if there are outputs."""
    parts, left, number = [], list(outputs or []), 0
    for cell in cells(name):
        parts.append(f"```python\n{cell.source}\n```" if cell.code else cell.source)
        if cell.code and left:
            output = left.pop(0)
            parts += [f"```text\n{output.text}\n```"] * bool(output.text)
            for _ in output.figures:
                number += 1
                parts.append(f"![output of the cell above](../images/tutorials/{name}_{number}.png)")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Render the named tutorials, or all."""
    from vlightning.common.messages import silence_noise

    silence_noise()
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.py")):
        start, before = time.perf_counter(), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            outputs = run(name)
            os.chdir(before)
        IMAGES.mkdir(parents=True, exist_ok=True)
        for old in IMAGES.glob(f"{name}_*.png"):
            old.unlink()
        for number, figure in enumerate((figure for output in outputs for figure in output.figures), 1):
            (IMAGES / f"{name}_{number}.png").write_bytes(figure)
        (FOLDER / f"{name}.md").write_text(page(name, outputs), encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
