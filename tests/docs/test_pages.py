"""Links between the pages, the site's navigation, the examples in Python and YAML, and the API reference."""

import ast
import contextlib
import importlib
import posixpath
import re

import pytest
import yaml

from support.project.pages import PAGES, ROOT, block, blocks, headings

EXAMPLES = [
    ("docs/callbacks.md", "tests/second_project/data.py"),
    ("docs/callbacks.md", "tests/second_project/model.py"),
    ("docs/callbacks.md", "tests/second_project/start.py"),
    ("docs/callbacks/state.md", "tests/second_project/callbacks/__init__.py"),
    ("docs/callbacks/state.md", "tests/support/methods/plain_moco.py"),
    ("docs/streams.md", "tests/datamodules/streams/project.py"),
    ("docs/adding_a_method.md", "tests/support/methods/toy_method.py"),
]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")


@pytest.mark.parametrize(("page", "file"), EXAMPLES)
def test_examples_are_shown_literally(page, file):
    assert block(file, page) == (ROOT / file).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in LINK.findall(re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M)):
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
        assert (ROOT / file).exists(), target
        if anchor:
            assert anchor[1:] in headings(file), f"{file}{anchor}"


def test_every_page_is_in_the_navigation_of_the_site():
    named = re.findall(r"[\w/]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert sorted(named) == sorted({"index.md", *pages})


def test_every_public_name_is_in_the_api_reference():
    shown = {
        name
        for page, text in PAGES.items()
        if page.startswith("docs/api/")
        for name in re.findall(r"^::: (\S+)", text, re.M)
    }
    last = {name.rpartition(".")[2] for name in shown}
    public = set()
    for file in ROOT.glob("*/**/__init__.py"):
        if file.parts[len(ROOT.parts)] not in ("tests", "build") and "__all__ = " in file.read_text():
            folder = ".".join(file.parent.relative_to(ROOT).parts)
            public |= set(importlib.import_module(f"vlightning.{folder}").__all__)
    assert len(public) > 90
    assert public <= last
    for name in shown:
        module, _, attribute = name.rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):  # a module of functions
            importlib.import_module(name)
            continue
        assert hasattr(importlib.import_module(module), attribute), name


PYTHON = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_python_compiles_and_imports_what_exists(page, number):
    tree = ast.parse(blocks(page, "python")[number])
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    # detectron2 is no package of an index: tests/benchmarks/test_cocord_detection.py.
    own = ("detectron2", "callbacks", "data", "model", "start")  # or files of the project on the pages about callbacks
    imports = [node for node in imports if str(getattr(node, "module", "")).partition(".")[0] not in own]
    exec(compile(ast.Module(imports, []), page, "exec"), {})


def test_the_pages_about_callbacks_show_every_public_name():
    page = "".join(text for name, text in PAGES.items() if name.startswith("docs/callbacks"))
    names = importlib.import_module("vlightning.callbacks").__all__
    missing = [name for name in names if f"`{name}" not in page and f"{name}(" not in page]
    assert set(missing) <= {"LeftOut", "load_all"}


@pytest.mark.parametrize("page", PAGES)
def test_yaml_is_yaml(page):
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


def test_quoted_messages_exist():
    quoted = {message for text in PAGES.values() for message in re.findall(r'"(Expected (?!\.)[^"]*) \.\.\."', text)}
    rooms = ("lightning_modules", "datamodules", "commands", "common")
    source = "".join(file.read_text() for room in rooms for file in (ROOT / room).rglob("*.py"))
    assert len(quoted) >= 10
    assert not [message for message in quoted if message not in source]


@pytest.mark.parametrize("page", ["docs/choosing.md", "docs/getting_started.md", "README.md"])
def test_measured_numbers_stand_on_the_page_of_what_was_measured(page):
    measured = ("docs/evaluation.md", "docs/results.md")
    sources = "".join(text for name, text in PAGES.items() if "/methods/" in name or name in measured)
    numbers = re.findall(
        r"(?<![\w.])\d+\.\d+(?![\w.]*\])",
        re.sub(r"^```.*?^```|v?\d\.\d+\.\d+|Python 3\.\d+|Apache-2\.0", "", PAGES[page], flags=re.S | re.M),
    )
    assert not [number for number in numbers if number not in sources]
