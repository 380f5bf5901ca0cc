"""A project with a package `callbacks` of its own uses each public callback of the installed wheel."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy

import vlightning.callbacks
from support.project.second_project import PROJECT, pages_of_callbacks
from support.project.wheel import ROOT, unpacked_wheel

PAGES = pages_of_callbacks()
BLOCKS = [block for blocks in PAGES.values() for block in blocks]
CALLBACKS = [
    name
    for name in vlightning.callbacks.__all__
    if inspect.isclass(public := getattr(vlightning.callbacks, name))
    and issubclass(public, Callback | Strategy | CheckpointIO)
]
CANNOT_BE_WRONG = {"OptimizerStepCallback", "StepSeedCallback", "StopOnSignal"}


@pytest.mark.parametrize("name", CALLBACKS)
def test_each_public_callback_has_its_section_with_uses_a_check_and_what_wrong_use_says(name):
    own = [block for block in BLOCKS if block.section == name]
    used = [block.code for block in own if block.said is None]
    assert any(name in code or "CountSteps" in code or "PlainMoCo()" in code for code in used)
    checks = {node.name for node in ast.parse((PROJECT / "checks.py").read_text()).body if hasattr(node, "name")}
    assert name in checks
    assert bool([block for block in own if block.said]) == (name not in CANNOT_BE_WRONG)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each process found, by numbers of processes and rank."""
    folder = tmp_path_factory.mktemp("second") / "project"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "blocks.json").write_text(json.dumps(PAGES))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PYTHON"))}
    environment |= {"PYTHONPATH": str(unpacked_wheel()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run_pages.py", "blocks.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {file.stem.removeprefix("found-"): json.loads(file.read_text()) for file in folder.glob("found-*.json")}


@pytest.mark.slow
def test_only_the_wheel_is_imported(found: dict[str, Any]):
    assert set(found) == {"1-0", "2-0", "2-1"}
    for each in found.values():
        assert Path(each["vlightning"]).parent.parent == unpacked_wheel()
        assert not [file for file in each["loaded"] if Path(file).is_relative_to(ROOT) and "site-packages" not in file]
        assert [file for file in each["loaded"] if file.endswith("project/callbacks/__init__.py")]


@pytest.mark.slow
def test_each_block_does_what_its_page_says_in_one_process_and_in_two(found: dict[str, Any]):
    for processes, each in found.items():
        for block, ran in zip(BLOCKS, each["blocks"], strict=True):
            if block.said is None:
                assert ran["error"] is None, (processes, block.section, ran["error"])
    checked = {ran["section"] for ran in found["2-1"]["blocks"] if ran.get("checked")}
    assert checked == set(CALLBACKS)


@pytest.mark.slow
def test_wrong_use_says_the_sentence_of_the_page(found: dict[str, Any]):
    of_processes = zip(*(each["blocks"] for each in found.values()), strict=True)
    for block, runs in zip(BLOCKS, of_processes, strict=True):
        if block.said is None:
            continue
        kind = block.said.partition(":")[0]
        if kind == "UserWarning":  # of rank 0
            assert any(block.said in run["warnings"] for run in runs), (block.section, runs)
            assert not [run["error"] for run in runs if run["error"]]
            continue
        said = dict(zip(found, (run["error"] for run in runs), strict=True))
        assert said["1-0"] == (None if "is_initialized" in block.code else block.said)
        assert {_without_numbers(said[process]) for process in ("2-0", "2-1")} == {_without_numbers(block.said)}
        assert re.match(r"UserError: Expected .*, (got|found none) .*: .*[.?]$", block.said)


def _without_numbers(sentence: str) -> str:
    """A sentence for any number of processes: they share samples, and a batch of both is twice as long."""
    return re.sub(r"\d+", "N", sentence)
