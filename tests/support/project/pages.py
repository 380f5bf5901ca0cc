"""The README and the pages of docs/: their code blocks and commands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}


def block(name: str, page: str = "README.md") -> str:
    """Content of the code block between two markers."""
    name = re.escape(name)
    found = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```\n<!-- end of {name} -->", PAGES[page], re.S)
    assert found, f"there is no block {name!r}"
    return found.group(1)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.S | re.M)


def commands(start: str = "") -> list[str]:
    """Commands of all pages, in code blocks and, with options, in the text; each once and in one line."""
    found: dict[str, None] = {}
    for page, text in PAGES.items():
        lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
        # Those without a file are the name of an option, and those with dots stand for several.
        inline = re.findall(r"`(vlightning \w+ --[^`]*(?:configs|runs)/[^`]*)`", text)
        inline = [command for command in inline if "..." not in command]
        found |= dict.fromkeys(" ".join(line.partition(" #")[0].split()) for line in (*lines, *inline))
    return [command for command in found if command and command.startswith(start)]


def headings(page: str) -> set[str]:
    """Anchors of a page's headings, as the code host and the site make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
