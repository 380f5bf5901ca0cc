"""The pages about callbacks, and a project that has installed the wheel and runs their blocks."""

import re
from typing import NamedTuple

from support.project.pages import PAGES, ROOT

PROJECT = ROOT / "tests/second_project"

_CODE, _SAID = r"^```python\n(?P<code>.*?)^```\n", r"(?:```text\n(?P<said>.*?)^```$)?"
_FENCES = re.compile(rf"^## (?P<section>.*?)$|{_CODE}{_SAID}", re.S | re.M)


class Block(NamedTuple):
    """A Python block: its section, its code, and the error or warning that follows it on the page, if any."""

    section: str
    code: str
    said: str | None


def pages_of_callbacks() -> dict[str, list[Block]]:
    """The Python blocks of each page about callbacks, from top to bottom."""
    names = [name for name in PAGES if name == "docs/callbacks.md" or name.startswith("docs/callbacks/")]
    return {name: list(_blocks(PAGES[name])) for name in names}


def _blocks(text: str) -> list[Block]:
    section, found = "", []
    for match in _FENCES.finditer(text):
        if match["code"] is None:
            section = match["section"]
        elif not re.search(r"<!-- tests/second_project/\S+ -->\n$", text[: match.start()]):  # a file of the project
            found.append(Block(section, match["code"], match["said"] and " ".join(match["said"].split())))
    return found
