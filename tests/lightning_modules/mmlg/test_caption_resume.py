"""A captioning run that was killed and resumed is bit for bit the one that was never stopped."""

import json

import pytest

from support.captioning import write_data
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
    arguments = write_data(tmp_path / "data", lessons=20)
    (tmp_path / "data" / "captions.json").write_text(json.dumps(arguments))
    data, whole, resumed = ("--captioning", tmp_path / "data"), tmp_path / "whole", tmp_path / "resumed"
    run(whole, 1, 1, accumulate, *data)
    run(resumed, 1, every_n_steps, accumulate, "--kill", hook, batch, *data, killed=True)
    assert not (resumed / "final.ckpt").exists()
    # Another seed: everything that matters has to come from the checkpoint.
    run(resumed, 2, every_n_steps, accumulate, "--resume", resumed / "last.ckpt", *data)

    leaves = assert_same_end(whole, resumed)
    assert "/state_dict/mapper.prefix" in leaves
    assert not any(path.startswith("/state_dict/language_model.") for path in leaves)
