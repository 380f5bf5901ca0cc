"""An extraction that was killed and resumed is bit for bit the one that was never stopped."""

import pytest

from support.mmlg import write_teacher
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
    teacher = ("--mmlg", write_teacher(tmp_path / "teacher.safetensors"))
    leaves = assert_resumed_run_is_whole(tmp_path, every_n_steps, accumulate, hook, batch, *teacher)
    for part in ("coefficients.text_multimodal", "blocks.multimodal.2.fc1.weight", "logit_scale"):
        assert f"/state_dict/student.{part}" in leaves
    assert not any(path.startswith("/state_dict/teacher.") for path in leaves)
