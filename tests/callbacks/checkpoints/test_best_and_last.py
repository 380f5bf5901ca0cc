"""The best and the last checkpoint, and a missing metric, which does not stop the run."""

from pathlib import Path

import pytest
import torch

from support.command_line import run, tiny_config


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


def fit(*words: str):
    return run("fit", "--config=tiny.yaml", "--trainer.max_epochs=3", "--model.learning_rate=0.01", *words)


def saved() -> dict[str, dict]:
    folder = Path("runs/tiny/version_0/checkpoints")
    return {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.ckpt")}


def test_the_metric_improves_so_best_and_last_are_the_third_epoch():
    assert fit().status == 0
    assert {name: content["epoch"] for name, content in saved().items()} == {"best-step6.ckpt": 2, "last.ckpt": 2}


def test_last_is_written_when_the_metric_does_not_improve():
    assert fit("--checkpoint.mode=min").status == 0  # worse is better: the first epoch stays the best
    assert {name: content["epoch"] for name, content in saved().items()} == {"best-step2.ckpt": 0, "last.ckpt": 2}


def test_another_metric_can_be_monitored():
    ran = fit("--model.metric=val/mine", "--checkpoint.monitor=val/mine")
    assert ran.status == 0, ran.err
    assert set(saved()) == {"best-step6.ckpt", "last.ckpt"}


def test_a_named_metric_that_is_not_logged_stops_the_run_with_the_nearest():
    ran = fit("--checkpoint.monitor=val/recal_mean")
    assert ran.status == 1
    assert "'val/recall_mean'" in ran.sentence


@pytest.mark.parametrize("words", [("--model.metric=val/mine",), ("--trainer.limit_val_batches=0",)], ids=" ".join)
def test_a_missing_default_metric_warns_once_and_keeps_the_last_checkpoint(words: tuple[str, ...]):
    with pytest.warns(UserWarning, match="'val/recall_mean'") as warned:
        assert fit(*words).status == 0
    assert len([w for w in warned if "only the last checkpoint is kept" in str(w.message)]) == 1
    assert set(saved()) == {"last.ckpt"}


def test_best_can_be_switched_off():
    assert fit("--checkpoint.save_top_k=0").status == 0
    assert set(saved()) == {"last.ckpt"}


def test_last_can_be_saved_between_epochs():
    assert fit("--last_checkpoint.every_n_train_steps=1", "--trainer.max_steps=3").status == 0
    assert saved()["last.ckpt"]["global_step"] == 3


def test_a_metric_logged_every_other_epoch_is_monitored_in_those_epochs():
    words = (
        "--model.metric=val/mine",
        "--model.every=2",
        "--checkpoint.monitor=val/mine",
        "--checkpoint.every_n_epochs=2",
    )
    ran = fit(*words, "--trainer.max_epochs=4")
    assert ran.status == 0, ran.err
    assert {name: content["epoch"] for name, content in saved().items()} == {"best-step8.ckpt": 3, "last.ckpt": 3}
