"""The README is short, and CI runs its test command."""

import os
import subprocess

from support.project.pages import PAGES, ROOT, block, commands

README = PAGES["README.md"]


def test_the_readme_is_a_screen_and_a_half():
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 1500
    assert README.count("![") == 1


def test_ci_runs_the_test_command_of_the_readme():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    shown = subprocess.run([ROOT / ".ci/run", "--show"], cwd="/", capture_output=True, text=True, timeout=60)
    assert shown.stdout == block("test command")
    assert "pytest" in shown.stdout


def test_the_first_command_is_the_quickstart():
    assert commands()[0] == "pip install -e . && vlightning fit --config configs/albef/quickstart.yaml"


def test_ci_builds_the_site_as_the_readme_says():
    assert 'pip install -e ".[docs]" && python -m mkdocs build --strict' in README
    assert "python -m mkdocs build --strict" in (ROOT / ".ci/run").read_text()
