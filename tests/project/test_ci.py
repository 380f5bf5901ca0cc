"""CI runs every Python that the package names, with the newest and the lowest versions of its dependencies."""

import os
import re
import subprocess
import tomllib

import yaml

from support.project.pages import ROOT

SCRIPT = (ROOT / ".ci/run").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_python_of_the_classifiers_is_run():
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    first = PROJECT["requires-python"].removeprefix(">=")
    others = re.search(r"\$\{PYTHONS-([^}]*)\}", SCRIPT)[1].split()
    assert named == {first} | {other.removeprefix("python") for other in others}
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["python"]
    assert named <= set(job["strategy"]["matrix"]["python"])
    assert {"python": first, "versions": "lowest"} in job["strategy"]["matrix"]["include"]


def test_every_quickstart_takes_two_steps_on_the_other_pythons():
    script = ROOT / ".ci/python"
    assert os.access(script, os.X_OK)
    for config in (ROOT / "configs").glob("*/quickstart*.yaml"):
        assert re.search(rf"\b{config.parent.name}/{config.stem}\b", script.read_text()), config


def test_a_python_that_is_missing_is_reported_in_one_line():
    lines = SCRIPT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("for other in"))
    end = next(i for i, line in enumerate(lines[start:], start) if line == "done")
    loop = "\n".join(["section() { printf '%s\\n' \"$1\"; }", *lines[start : end + 1]])
    environment = os.environ | {"PYTHONS": "python3.99"}
    ran = subprocess.run(["bash", "-euo", "pipefail", "-c", loop], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stdout == "Other Pythons: python3.99 is not installed, left out\n"


def test_every_test_is_in_the_command_of_the_readme_or_in_the_slow_section():
    command = subprocess.run([ROOT / ".ci/run", "--show"], capture_output=True, text=True, check=True).stdout
    assert '-m "not slow"' in command
    assert re.search(r"^  pytest .*-m slow < /dev/null$", SCRIPT, re.M)
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["slow"]
    assert re.search(r"pytest .*-m slow$", job["steps"][-1]["run"])
