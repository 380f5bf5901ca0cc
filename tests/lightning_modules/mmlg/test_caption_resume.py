"""A captioning run that was killed and resumed is bit for bit the one that was never stopped."""

import json

import pytest

from support.captioning import write_data
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
    arguments = write_data(tmp_path / "data", lessons=20)
    (tmp_path / "data" / "captions.json").write_text(json.dumps(arguments))
    data = ("--captioning", tmp_path / "data")
    leaves = assert_resumed_run_is_whole(tmp_path, every_n_steps, accumulate, hook, batch, *data)
    assert "/state_dict/mapper.prefix" in leaves
    assert not any(path.startswith("/state_dict/language_model.") for path in leaves)
