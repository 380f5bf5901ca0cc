"""A distillation that was killed and resumed is bit for bit the one that was never stopped."""

import pytest

from support.cocord import teacher_file
from support.resume import assert_resumed_run_is_whole
from support.shre import CLASSES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_n_steps", "accumulate", "hook", "batch"),
    [
        pytest.param(1, 1, "on_before_optimizer_step", 7, id="mid-epoch"),
        pytest.param(1, 2, "on_train_batch_start", 8, id="accumulating"),
        pytest.param(0, 1, "on_train_epoch_start", 8, id="epoch-end"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, every_n_steps, accumulate, hook, batch):
    teacher = ("--shre", teacher_file(tmp_path, "resnet8", CLASSES))
    leaves = assert_resumed_run_is_whole(tmp_path, every_n_steps, accumulate, hook, batch, *teacher)
    for part in ("scales.h1", "student.shared_encoder.fc1.weight", "student.image_encoder.cls_token"):
        assert f"/state_dict/{part}" in leaves
    assert not any(path.startswith("/state_dict/teacher.") for path in leaves)
