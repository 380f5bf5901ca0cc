"""Hooks of the site: the README is its first page, and links to files outside of docs/ go to the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as `index.md`, with links as from docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    home = LINK.sub(lambda found: f"]({posixpath.relpath(found[1], 'docs')}{found[2] or ''})", text)
    files.append(File.generated(config, "index.md", content=home))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files outside of docs/ into links to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def absolute(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{found[2] or ''})"

    return LINK.sub(absolute, markdown)
