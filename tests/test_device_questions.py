"""Number of times that a training step on a GPU makes the host wait, counted on a simulated GPU."""

import json
import os
from pathlib import Path

import pytest

from support.forked import run_script

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the waits of one step by case: kind, calling function, and count."""
    folder = tmp_path_factory.mktemp("questions")
    path = os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
    ran = run_script([SUPPORT / "device_questions.py", folder], env=os.environ | {"PYTHONPATH": path}, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "questions.json").read_text())


@pytest.mark.parametrize("case", ["mobileclip", "shre"])
def test_a_step_synchronizes_with_the_device_once_for_the_finite_check(asked, case):
    assert asked[case] == {"number: callbacks/non_finite.py _judge": 1}


def test_processes_agree_on_a_signal_one_step_late(asked):
    assert asked["stop_on_signal_of_two"] == {"answers": 5}
