"""What the README shows is what the repository holds."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.command_line import run

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """Content of the code block between two markers."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w*\n(.*?)```\n<!-- end of {re.escape(name)} -->", README, re.S)
    assert found, f"README.md has no block {name!r}"
    return found.group(1)


def test_the_example_module_is_shown_literally():
    assert block("tests/support/plain_moco.py") == (ROOT / "tests/support/plain_moco.py").read_text()


def test_ci_runs_the_test_command_of_the_readme():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    shown = subprocess.run([ROOT / ".ci/run", "--show"], cwd="/", capture_output=True, text=True, timeout=60)
    assert shown.stdout == block("test command")
    assert "pytest" in shown.stdout


def test_every_config_that_is_named_exists_and_every_shipped_one_is_named():
    named = set(re.findall(r"configs/[\w/]+\.yaml", README))
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert named <= shipped
    assert shipped <= named


OWN_DATA = re.search(r"```yaml\n# my_data.yaml\n(.*?)```", README, re.S)
LINES = README.replace("\\\n", " ").splitlines()
COMMANDS = [line.split("&& ")[-1] for line in LINES if line.startswith(("vlightning ", "pip install -e . &&"))]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_shown_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert OWN_DATA is not None
    Path("my_data.yaml").write_text(OWN_DATA.group(1))
    words = command.split()[1:]
    if "--ckpt_path" in words:
        at = words.index("--ckpt_path")
        assert words[at + 1].endswith("checkpoints/last.ckpt")
        del words[at : at + 2]
        if words == ["test"]:
            return  # everything comes from the checkpoint: tests/cli_support/test_resume.py
    ran = run(*words, *([] if "--print_config" in words else ["--print_config"]))
    assert ran.status == 0, ran.err


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5
    assert COMMANDS[0] == "vlightning fit --config configs/albef/quickstart.yaml"
