"""An extraction that was killed and resumed is bit for bit the one that was never stopped."""

import pytest

from support.mmlg import write_teacher
from support.resume import assert_same_end, run


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
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(whole, 1, 1, accumulate, *teacher)
    run(resumed, 1, every_n_steps, accumulate, "--kill", hook, batch, *teacher, killed=True)
    assert not (resumed / "final.ckpt").exists()
    # Another seed: everything that matters has to come from the checkpoint.
    run(resumed, 2, every_n_steps, accumulate, "--resume", resumed / "last.ckpt", *teacher)

    leaves = assert_same_end(whole, resumed)
    for part in ("coefficients.text_multimodal", "blocks.multimodal.2.fc1.weight", "logit_scale"):
        assert f"/state_dict/student.{part}" in leaves
    assert not any(path.startswith("/state_dict/teacher.") for path in leaves)
