"""The best and the last checkpoint, and a missing metric, which does not stop the run."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback

from support.runs.command_line import run, tiny_config
from vlightning.commands.cli.saved_run import step_of


class SavedSteps(Callback):
    """Notes the step of each checkpoint that is written."""

    steps: ClassVar[list[int]] = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.steps.append(trainer.global_step)


class StopsEarly(Callback):
    """Ends the training after its first step, as the Timer of `max_time` does when the time is over."""

    def on_train_batch_end(self, trainer, *_) -> None:
        trainer.should_stop = True


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


RARELY = "--last_checkpoint.every_n_train_steps=1000"
STOPPING = "{class_path: EarlyStopping, init_args: {monitor: val/recall_mean, mode: min, patience: 1}}"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (6, (RARELY,)),
        (6, (RARELY, "--trainer.limit_val_batches=0")),
        (6, ("--last_checkpoint.every_n_train_steps=4",)),
        (6, ("--last_checkpoint.every_n_epochs=2",)),
        (6, ("--trainer.check_val_every_n_epoch=2",)),
        (3, (RARELY, "--trainer.max_steps=3")),
        (3, ("--trainer.val_check_interval=1", "--last_checkpoint.every_n_epochs=2", "--trainer.max_steps=3")),
        (2, (RARELY, "--trainer.max_steps=2", "--trainer.accumulate_grad_batches=2")),
        (4, (RARELY, f"--trainer.callbacks={STOPPING}")),
        (1, (RARELY, f"--trainer.callbacks={__name__}.StopsEarly")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
@pytest.mark.filterwarnings("ignore:No metric")
def test_the_end_of_a_run_is_saved_however_it_ends(end: int, words: tuple[str, ...]):
    ran = fit(*words)
    assert ran.status == 0, ran.err
    assert saved()["last.ckpt"]["global_step"] == end


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 6]), (4, [4, 6])])
def test_the_end_of_a_run_is_saved_once(every: int, steps: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SavedSteps, "steps", [])
    words = ("--checkpoint.save_top_k=0", f"--last_checkpoint.every_n_train_steps={every}")
    assert fit(*words, f"--trainer.callbacks={__name__}.SavedSteps").status == 0
    assert SavedSteps.steps == steps


@pytest.mark.parametrize("first", ["--trainer.max_steps=3", "--trainer.max_steps=2", "--trainer.max_epochs=2"])
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.filterwarnings("ignore:No metric")
def test_a_run_that_goes_on_from_its_end_to_more_steps_equals_the_uninterrupted_run(first: str, validates: bool):
    data = "{class_path: ShapesDataModule, init_args: {image_size: 16, length: 16, batch_size: 8, num_workers: 0}}"
    own = "--model=ImageModel", f"--data={data}", "--data.eval_length=8"
    own = *own, f"--trainer.limit_val_batches={int(validates)}"
    quiet = "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"
    words = *own, *quiet, RARELY, "--trainer.logger.name=tiny"
    longer = "--trainer.max_steps=7", "--trainer.max_epochs=-1"
    folder = "runs/tiny/version_{}/checkpoints/last.ckpt"
    assert run("fit", *words, first).status == 0
    for more in ((f"--ckpt_path={folder.format(0)}",), ()):
        ran = run("fit", *words, *longer, *more)
        assert ran.status == 0, ran.err
    resumed, whole = (torch.load(folder.format(version), weights_only=True) for version in (1, 2))
    assert (resumed["global_step"], resumed["epoch"]) == (whole["global_step"], whole["epoch"]) == (7, 3)
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name


def best_state(version: int) -> dict:
    content = torch.load(f"runs/tiny/version_{version}/checkpoints/last.ckpt", weights_only=True)
    (state,) = [state for name, state in content["callbacks"].items() if name.startswith("BestCheckpoint")]
    return state


@pytest.mark.parametrize(
    "words",
    [
        ("--checkpoint.mode=min",),  # the first epoch stays the best
        (),  # the last one is the best
        ("--checkpoint.mode=min", "--checkpoint.save_top_k=2"),
        ("--model=ReportingModel",),  # equal values
        ("--model=ReportingModel", "--checkpoint.save_top_k=2", "--checkpoint.mode=min"),
    ],
    ids=" ".join,
)
def test_a_resumed_run_keeps_the_same_best_as_the_uninterrupted_run(words: tuple[str, ...]):
    ran = fit(*words)
    assert ran.status == 0, ran.err
    for version, epochs in enumerate((1, 2, 3)):  # resumed twice, the second time from its second version
        more = (f"--ckpt_path=runs/tiny/version_{version}/checkpoints/last.ckpt",) if version else ()
        ran = fit(*words, f"--trainer.max_epochs={epochs}", *more)
        assert ran.status == 0, ran.err
    whole, resumed = best_state(0), best_state(3)
    folders = [Path(state["dirpath"]) for state in (whole, resumed)]
    kept = [sorted(path.name for path in folder.glob("best*")) for folder in folders]
    assert kept[0] == kept[1]
    assert Path(resumed["best_model_path"]).parent == folders[1]
    assert Path(resumed["best_model_path"]).name == Path(whole["best_model_path"]).name
    assert resumed["best_model_score"] == whole["best_model_score"]
    assert {Path(path).name: value for path, value in resumed["best_k_models"].items()} == {
        Path(path).name: value for path, value in whole["best_k_models"].items()
    }
    for name in kept[0]:
        first, second = (torch.load(folder / name, weights_only=True)["state_dict"] for folder in folders)
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_best_of_all_versions_is_found_after_a_resume_and_in_an_older_version():
    assert fit("--checkpoint.mode=min", "--trainer.max_epochs=1").status == 0
    assert fit("--checkpoint.mode=min", "--ckpt_path=last").status == 0
    best = "runs/tiny/version_{}/checkpoints/best-step2.ckpt"
    assert f"Checkpoint: {best.format(1)}, the best" in run("test", "--config=tiny.yaml", "--ckpt_path=best").out
    assert fit("--checkpoint.mode=min", "--model.learning_rate=0.02").status == 0  # a larger value, so a worse one
    assert f"Checkpoint: {best.format(1)}, the best" in run("test", "--config=tiny.yaml", "--ckpt_path=best").out
    named = run("test", "--config=tiny.yaml", "--ckpt_path=best", "--trainer.logger.version=2")
    assert f"Checkpoint: {best.format(2)}, the best" in named.out


def test_a_run_resumed_by_its_checkpoint_alone_keeps_its_metric():
    assert fit("--checkpoint.mode=min", "--trainer.max_epochs=1").status == 0
    own = "--model=TinyModel", "--data=TinyData", "--trainer.accelerator=cpu", "--trainer.max_epochs=2"
    ran = run("fit", "--ckpt_path=runs/tiny/version_0/checkpoints/last.ckpt", *own)
    assert ran.status == 0, ran.err
    assert Path("runs/tiny/version_1/checkpoints/best-step2.ckpt").is_file()


def test_a_missing_best_checkpoint_is_named_when_a_run_resumes():
    assert fit("--checkpoint.mode=min", "--trainer.max_epochs=1").status == 0
    Path("runs/tiny/version_0/checkpoints/best-step2.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"the best checkpoint of the run's earlier part, '.*best-step2.ckpt'"):
        assert fit("--checkpoint.mode=min", "--ckpt_path=last").status == 0
    assert Path("runs/tiny/version_1/checkpoints/best-step4.ckpt").is_file()


def test_a_run_that_resumes_under_its_old_name_may_keep_fewer_checkpoints():
    assert fit("--trainer.max_epochs=1", "--checkpoint.save_top_k=2").status == 0
    Path("runs/tiny/version_0").rename("earlier")  # the resumed run gets the name again
    ran = fit("--ckpt_path=earlier/checkpoints/last.ckpt", "--checkpoint.save_top_k=1")
    assert ran.status == 0, ran.err
    assert set(saved()) == {"best-step6.ckpt", "last.ckpt"}


@pytest.mark.parametrize("step", [0, 255, 70_000, 2**40])
def test_the_step_of_a_checkpoint_is_read_without_the_rest(step: int, monkeypatch: pytest.MonkeyPatch):
    torch.save({"epoch": 3, "global_step": step, "state_dict": {"weight": torch.ones(2)}}, "some.ckpt")
    monkeypatch.setattr(torch, "load", None)
    assert step_of(Path("some.ckpt")) == step


def test_the_step_is_found_wherever_it_was_written():
    torch.save({"state_dict": {str(number): torch.ones(1) for number in range(50)}, "global_step": 7}, "some.ckpt")
    assert step_of(Path("some.ckpt")) == 7
