"""A run that was killed and resumed is bit for bit the run that was never stopped."""

import pytest

from support.resume import assert_same_end, run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = {}

    def whole_run(accumulate, *options):
        key = accumulate, *options
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole")
            run(runs[key], 1, 1, accumulate, *options)
        return runs[key]

    return whole_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_n_steps", "accumulate", "hook", "batch", "options"),
    [
        pytest.param(1, 1, "on_before_optimizer_step", 7, (), id="mid-epoch"),
        pytest.param(2, 2, "on_train_batch_start", 8, (), id="mid-epoch-accumulating"),
        pytest.param(4, 1, "on_train_epoch_end", 8, (), id="last-batch"),
        pytest.param(0, 1, "on_train_epoch_start", 8, (), id="epoch-end"),
        pytest.param(3, 1, "on_validation_batch_start", 8, (), id="validation"),
        pytest.param(1, 1, "on_before_optimizer_step", 7, ("--fine-tuning",), id="fine-tuning"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path, uninterrupted, every_n_steps, accumulate, hook, batch, options
):
    whole = uninterrupted(accumulate, *options)
    run(tmp_path, 1, every_n_steps, accumulate, "--kill", hook, batch, *options, killed=True)
    assert not (tmp_path / "final.ckpt").exists()
    # Another seed: everything that matters has to come from the checkpoint.
    run(tmp_path, 2, every_n_steps, accumulate, "--resume", tmp_path / "last.ckpt", *options)

    leaves = assert_same_end(whole, tmp_path)
    assert any(path.startswith("/state_dict/teacher.") for path in leaves)
    assert any("queue.features" in path for path in leaves)
    assert any("exp_avg" in path for path in leaves)
