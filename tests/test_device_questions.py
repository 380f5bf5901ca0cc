"""How often a training step on a GPU makes the host wait for it, counted on a GPU that is not there."""

import json
import os
from pathlib import Path

import pytest

from support.forked import run_script

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """By case: what was asked by which function, and how often, in one step."""
    folder = tmp_path_factory.mktemp("questions")
    path = os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
    ran = run_script([SUPPORT / "device_questions.py", folder], env=os.environ | {"PYTHONPATH": path}, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "questions.json").read_text())


@pytest.mark.parametrize("case", ["mobileclip", "shre"])
def test_a_step_asks_the_device_once_whether_it_is_to_be_skipped_and_nothing_else(asked, case):
    assert asked[case] == {"number: callbacks/non_finite.py _judge": 1}


def test_processes_agree_on_a_signal_by_what_was_said_a_step_ago(asked):
    assert asked["stop_on_signal_of_two"] == {"answers": 5}
