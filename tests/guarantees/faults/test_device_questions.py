"""Number of times that a training step on a GPU makes the host wait, counted on a simulated GPU."""

import json
import os
from pathlib import Path

import pytest

from support.runs.forked import run_script

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the waits of one step by case: kind, calling function, and count."""
    folder = tmp_path_factory.mktemp("questions")
    path = os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
    ran = run_script(
        [SUPPORT / "devices" / "device_questions.py", folder], env=os.environ | {"PYTHONPATH": path}, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "questions.json").read_text())


FINITE = {"answer: callbacks/non_finite.py _decide": 1}
"""Whether the step is skipped, once for each batch: at its end if the optimizer is fused, before the step otherwise."""
SIGNAL = {"answer: callbacks/stopping.py _stop_if_asked": 1}
"""Of the step before."""
SCALED = {"number: callbacks/optimizer_step.py _after_step": 1}
"""Under fp16: whether a fused optimizer found infinite gradients, which decides whether its averages move."""
SGD_SCALED = {"number: lightning_modules/base/method.py optimizer_step": 1}
"""Under fp16 with an optimizer that is not fused, torch's scaler asks the same first."""
EVALUATED = {"copy: lightning_modules/evaluation/retrieval_result.py _add": 8}
"""Features and ids of a batch, which are collected in main memory."""
TOKENS = {"copy: lightning_modules/evaluation/reranking.py append": 1}
"""Tokens of a batch of images, for re-ranking."""
METHODS = ("albef", "cocord", "mmlg", "mobileclip", "shre")


@pytest.mark.slow
def test_a_step_of_any_method_asks_the_device_only_whether_it_is_finite(asked):
    steps = asked["steps"]
    assert len(steps) == 15
    for case, found in steps.items():
        name, memory, precision = case.split()
        batches = 2 if memory == "accumulation" else 1
        expected = dict.fromkeys(FINITE, batches) | SIGNAL
        if precision == "16-mixed":
            expected |= {"albef": SCALED, "mobileclip": SCALED, "cocord": SGD_SCALED}.get(name, {})
        assert found["asked"] == expected, case


def test_the_steps_cover_every_pair_of_method_precision_and_memory(asked):
    parts = [case.split() for case in asked["steps"]]
    assert {(name, precision) for name, _, precision in parts} == {
        (name, precision) for name in METHODS for precision in ("32-true", "bf16-mixed", "16-mixed")
    }
    settings = {(name, memory) for name, memory, _ in parts}
    assert settings == {
        (name, memory)
        for name in METHODS
        for memory in ("whole", "slices", "accumulation")
        if (name, memory) != ("cocord", "slices")
    }
    assert len({(memory, precision) for _, memory, precision in parts}) == 9


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_a_batch_of_an_evaluation_only_copies_what_is_collected(asked, name, stage):
    expected = {} if name == "cocord" else EVALUATED
    (found,) = (found for case, found in asked["evaluations"].items() if case.split()[:2] == [name, stage])
    assert found == expected | (TOKENS if name == "albef" else {})


def test_the_evaluations_cover_every_pair_of_stage_precision_and_memory(asked):
    cases = [case.split()[1:] for case in asked["evaluations"]]
    for one, other, pairs in ((0, 1, 6), (0, 2, 6)):
        assert len({(case[one], case[other]) for case in cases}) == pairs


def test_fine_tuning_of_albef_for_tasks_asks_nothing_else(asked):
    assert asked["tasks"] == {
        **{f"{name} fit": FINITE for name in ("entailment", "nlvr", "assignment")},
        **{f"{name} validate": {} for name in ("entailment", "nlvr")},
    }


@pytest.mark.parametrize("case", ["mobileclip", "shre", "albef_vqa"])
def test_slices_with_batch_norm_and_a_teacher_with_other_images_ask_nothing_else(asked, case):
    assert asked[case] == FINITE


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "adapters"])
def test_fine_tuning_of_a_clip_with_its_own_callbacks_asks_nothing_else(asked, kind):
    assert asked["clip"][kind] == FINITE


def test_images_that_arrive_as_bytes_are_converted_without_a_question(asked):
    assert asked["pixels"]["Pixels"] == FINITE
    assert asked["pixels"]["ConstantsInEachStep"] == {
        **FINITE,
        "copy: datamodules/transforms/normalize.py _on": 1,
    }


def test_planted_faults_are_found_where_they_are(asked):
    functions = {
        "index from the host": "index_from_the_host",
        "number": "number",
        "boolean index": "mask",
        "copy": "constant",
        "multinomial": "draw",
    }
    planted = {
        f"{kind}: tests/support/devices/device_questions.py planted_{name}": 1 for kind, name in functions.items()
    }
    assert asked["planted"] == planted | {"logged from the host: train/planted": 1}
    (error,) = asked["mixed_devices"]
    assert "found at least two devices, cuda:0 and cpu" in error


def test_processes_send_tensors_on_the_device_alone(asked):
    """NCCL refuses others; over gloo, where `test_collectives.py` compares what is sent, all are on the CPU."""
    for case, found in asked["steps"].items():
        assert set(found["devices"]) == {"cuda"}, case
    assert set(asked["sent_from_the_host"]) == {"cuda", "cpu"}


def test_processes_agree_on_a_signal_one_step_late(asked):
    assert asked["stop_on_signal_of_two"] == {question: 5 for question in SIGNAL}
