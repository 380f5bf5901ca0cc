"""Hooks of the site: its first page, links out of docs/, and the tutorials as notebooks.

The README is the first page, links to files outside of docs/ go to the repository, and each tutorial has a notebook
beside its page, which Colab opens from the branch that the hosted site is built on.
"""

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
TUTORIAL = re.compile(r"tutorials/(\w+)\.md")
# The branch and folder that `.github/workflows/docs.yml` writes the newest release's site to.
HOSTED = "gh-pages/latest"


def on_config(config: Any) -> Any:
    """Let the hosted site, for which `.github/workflows/docs.yml` sets DOCS_VERSIONS, offer its versions."""
    if "DOCS_VERSIONS" in os.environ:
        config.extra["version"] = {"provider": os.environ["DOCS_VERSIONS"]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the README as `index.md`, with links as from docs/, and a notebook of each tutorial."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    home = LINK.sub(lambda found: f"]({posixpath.relpath(found[1], 'docs')}{found[2] or ''})", text)
    files.append(File.generated(config, "index.md", content=home))
    for path in sorted((ROOT / "docs/tutorials").glob("*.py")):
        content = json.dumps(notebook(path), indent=1, ensure_ascii=False)
        files.append(File.generated(config, f"tutorials/{path.stem}.ipynb", content=content))
    return files


def notebook(path: Path) -> nbformat.NotebookNode:
    """Return the notebook of a tutorial, which begins with a cell that installs the package.

    Args:
        path: the tutorial in jupytext's percent format.
    """
    cells = jupytext.read(path)
    cells.cells.insert(1, nbformat.v4.new_code_cell("%pip install --quiet vlightning"))
    for number, cell in enumerate(cells.cells):
        cell["id"] = f"{path.stem}-{number}"  # random by default: the same tutorial is then the same file
    cells.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.validate(cells)
    return cells


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files outside of docs/ into links to the repository, and link a tutorial to its notebook."""
    folder = posixpath.dirname(page.file.src_uri)
    if tutorial := TUTORIAL.fullmatch(page.file.src_uri):
        repository = config.repo_url.removeprefix("https://github.com/")
        colab = f"https://colab.research.google.com/github/{repository}/blob/{HOSTED}/tutorials/{tutorial[1]}.ipynb"
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n[Open in Colab]({colab}) or take the [notebook]({tutorial[1]}.ipynb).\n{rest}"

    def absolute(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{found[2] or ''})"

    return LINK.sub(absolute, markdown)
