"""A distillation that was killed and resumed is bit for bit the one that was never stopped."""

import pytest

from support.cocord import teacher_file
from support.resume import assert_resumed_run_is_whole


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
    teacher = ("--cocord", teacher_file(tmp_path, classes=40))
    leaves = assert_resumed_run_is_whole(tmp_path, every_n_steps, accumulate, hook, batch, *teacher)
    for part in ("slow_student.", "slow_head.", "teacher_head.", "dictionary.features", "dictionary.pointer"):
        assert any(path.startswith(f"/state_dict/{part}") for path in leaves)
    assert not any(path.startswith("/state_dict/teacher.") for path in leaves)
    assert any("momentum_buffer" in path for path in leaves)
