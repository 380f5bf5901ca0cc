"""What is typed wins over the checkpoint; what is not typed comes from it; the seed is the checkpoint's."""

import itertools
import json
import os
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from support.runs.command_line import CONFIG, run, tiny_config
from vlightning.commands.cli.saved_run import read_saved_run

HOUR = {"max_time": "00:01:00:00"}
CHECKPOINT = "runs/tiny/version_0/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)
    ran = run("fit", "--config=tiny.yaml", "--model.learning_rate=0.01", "--data.vocab_size=20", "--seed_everything=7")
    assert ran.status == 0, ran.err


def resume(*words: str, config: str = "tiny.yaml", checkpoint: str = CHECKPOINT):
    return run("fit", f"--config={config}", f"--ckpt_path={checkpoint}", "--trainer.max_epochs=2", *words)


def resumed() -> dict:
    return torch.load("runs/tiny/version_1/checkpoints/last.ckpt", weights_only=True)


def test_what_is_not_typed_comes_from_the_checkpoint():
    ran = resume()
    assert ran.status == 0, ran.err
    assert "warning: model" not in ran.err
    after = resumed()
    assert after["hyper_parameters"]["learning_rate"] == 0.01
    assert after["hyper_parameters"]["vocab_size"] == 20
    assert after["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01
    assert after["global_step"] == 4


@pytest.mark.parametrize("form", ["--model.learning_rate=0.5", "--model.init_args.learning_rate=0.5", "file"])
def test_what_is_typed_wins_even_over_the_optimizer_state(tmp_path: Path, form: str):
    if form == "file":
        tiny_config(tmp_path, "more.yaml", "model: {class_path: TinyModel, init_args: {learning_rate: 0.5}}")
        form = "--config=more.yaml"
    ran = resume(form)
    assert ran.status == 0, ran.err
    lines = [line for line in ran.err.splitlines() if "warning: model" in line]
    assert len(lines) == 1
    assert "learning_rate is 0.5" in lines[0]
    assert "0.01" in lines[0]
    after = resumed()
    assert after["hyper_parameters"]["learning_rate"] == 0.5
    assert after["optimizer_states"][0]["param_groups"][0]["lr"] == 0.5
    saved = yaml.safe_load(Path("runs/tiny/version_1/config.yaml").read_text())
    assert saved["model"]["init_args"]["learning_rate"] == 0.5


def test_options_override_files_in_any_order():
    """Also a file that names no checkpoint and another batch size, as one with every default does."""
    whole = yaml.safe_load(Path("runs/tiny/version_0/config.yaml").read_text())
    assert "ckpt_path" not in whole
    Path("whole.yaml").write_text(yaml.safe_dump(whole | {"ckpt_path": None}))
    words = (f"--ckpt_path={CHECKPOINT}", "--data.batch_size=4", "--config=whole.yaml")
    for number, order in enumerate(itertools.permutations(words)):
        ran = run("validate", *order)
        assert ran.status == 0, ran.err
        folder = Path(f"runs/tiny/version_0_validate_{number}")
        assert json.loads((folder / "metrics.json").read_text())["checkpoint"] == CHECKPOINT, order
        assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]["batch_size"] == 4, order


@pytest.mark.parametrize("config_first", [True, False])
def test_a_run_goes_on_from_its_checkpoint_with_its_config_before_or_after_it(config_first: bool):
    words = [f"--ckpt_path={CHECKPOINT}", "--config=runs/tiny/version_0/config.yaml"]
    ran = run("fit", *(reversed(words) if config_first else words), "--trainer.max_epochs=2")
    assert ran.status == 0, ran.err
    assert resumed()["global_step"] == 4


def test_a_typed_size_that_does_not_fit_the_weights_is_one_sentence():
    ran = resume("--model.init_args.dim=99")
    assert ran.status == 1
    assert "does not fit TinyModel" in ran.sentence
    assert "[5, 3]" in ran.sentence
    assert "[99, 3]" in ran.sentence


def test_a_typed_value_equal_to_the_checkpoints_is_not_reported():
    assert "warning: model" not in resume("--model.learning_rate=0.01").err


def test_the_checkpoints_seed_wins_with_a_warning():
    ran = resume("--seed_everything=3")
    assert ran.status == 0, ran.err
    assert "seed_everything is 3" in ran.err
    assert resumed()["TinyData"] == {"seed": 7}


def test_the_checkpoints_seed_is_taken_silently_when_none_is_typed():
    assert "seed_everything is" not in resume().err
    assert resumed()["TinyData"] == {"seed": 7}


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_evaluation_needs_no_model_config(subcommand: str):
    words = ("--model=TinyModel", "--data=TinyData", "--trainer.accelerator=cpu")  # without their arguments
    ran = run(subcommand, f"--ckpt_path={CHECKPOINT}", *words)
    assert ran.status == 0, ran.err


def test_evaluation_without_data_points_to_the_runs_config():
    ran = run("validate", f"--ckpt_path={CHECKPOINT}", "--model=TinyModel")
    assert ran.status == 2
    assert "runs/tiny/version_0/config.yaml" in ran.sentence


def test_another_class_does_not_get_the_checkpoints_hyper_parameters():
    ran = resume("--model=NoVocabularyModel", "--model.size=5")
    assert "whose hyper-parameters are not used" in ran.err


def test_a_missing_checkpoint_names_the_nearest():
    ran = resume(checkpoint="runs/tiny/version_0/checkpoints/lst.ckpt")
    assert ran.status == 2
    assert "'runs/tiny/version_0/checkpoints/last.ckpt'" in ran.sentence
    assert "last.ckpt" in resume(checkpoint="runs/tiny/version_9/checkpoints/last.ckpt").sentence


def test_a_file_that_is_no_checkpoint_is_one_sentence(tmp_path: Path):
    (tmp_path / "notes.ckpt").write_text("not a checkpoint")
    ran = resume(checkpoint="notes.ckpt")
    assert ran.status == 2
    assert "notes.ckpt" in ran.sentence
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    assert "without `state_dict`" in resume(checkpoint="other.ckpt").sentence


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path: Path):
    torch.save({"state_dict": {}, "hyper_parameters": {"path": Path("x")}}, tmp_path / "unsafe.ckpt")
    assert "weights_only=True" in resume(checkpoint="unsafe.ckpt").sentence


def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path):
    content = Path(CHECKPOINT).read_bytes()
    (tmp_path / "half.ckpt").write_bytes(content[: len(content) // 2])
    ran = resume(checkpoint="half.ckpt")
    assert ran.status == 2
    assert "half.ckpt" in ran.sentence


def test_last_keeps_lightnings_meaning():
    ran = resume("--trainer.logger.version=0", checkpoint="last")
    assert ran.status == 0, ran.err
    assert torch.load(CHECKPOINT, weights_only=True)["global_step"] == 4


def as_folder(file: str) -> str:
    """The same checkpoint in the form of a sharded one, of which no process holds a piece."""
    folder = Path(file).with_name("folder.ckpt")
    folder.mkdir()
    torch.save(torch.load(file, weights_only=True) | {"files_with_pieces": 0}, folder / "meta.pt")
    return str(folder)


def test_the_folder_of_a_sharded_checkpoint_is_read_like_a_file():
    ran = resume(checkpoint=as_folder(CHECKPOINT))
    assert ran.status == 0, ran.err
    after = resumed()
    assert after["hyper_parameters"]["learning_rate"] == 0.01
    assert after["TinyData"] == {"seed": 7}
    assert after["global_step"] == 4


def test_what_is_no_sharded_checkpoint_is_one_sentence():
    folder = as_folder(CHECKPOINT)
    ran = resume(checkpoint=f"{folder}/meta.pt")
    assert ran.status == 2
    assert f"give the folder, {folder!r}" in ran.sentence
    Path(folder, "meta.pt").unlink()
    ran = resume(checkpoint=folder)
    assert ran.status == 2
    assert "Expected a complete checkpoint" in ran.sentence


def shaping(file: str) -> dict:
    return torch.load(file, weights_only=True)["vlightning_run"]


def test_the_runs_settings_and_name_come_from_the_checkpoint_wherever_it_lies(tmp_path: Path):
    words = ("--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=0.5", "--trainer.precision=bf16-mixed")
    clip = "--trainer.gradient_clip_algorithm=value"
    long = ("--trainer.max_epochs=9", "--trainer.max_time=00:01:00:00")
    assert run("fit", "--config=tiny.yaml", *words, clip, *long, "--trainer.limit_train_batches=1").status == 0
    settings = shaping("runs/tiny/version_1/checkpoints/last.ckpt")
    assert settings["name"] == "tiny"
    kept = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    assert settings["trainer"] == kept | {"max_epochs": 9, "max_steps": -1, "precision": "bf16-mixed", **HOUR}
    Path("elsewhere").mkdir()
    content = torch.load("runs/tiny/version_1/checkpoints/last.ckpt", weights_only=True)
    settings["trainer"]["max_epochs"] = 11  # as if it had been stopped
    torch.save(content | {"vlightning_run": settings}, "elsewhere/copied.ckpt")
    own = ("--model=TinyModel", "--data=TinyData", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
    ran = run("fit", "--ckpt_path=elsewhere/copied.ckpt", *own, "--trainer.gradient_clip_val=0.25")
    assert ran.status == 0, ran.err
    assert "Run folder: runs/tiny/version_2\n" in ran.out
    assert "trainer.max_epochs 11" in ran.out
    assert "gradient_clip_val" not in ran.out
    after = "runs/tiny/version_2/checkpoints/last.ckpt"
    assert shaping(after)["trainer"] == settings["trainer"] | {"gradient_clip_val": 0.25}
    assert torch.load(after, weights_only=True)["epoch"] == 10
    assert yaml.safe_load(Path("runs/tiny/version_2/config.yaml").read_text())["trainer"]["precision"] == "bf16-mixed"
    # A length that was typed stands for the other one too; an evaluation has none.
    ran = run("fit", f"--ckpt_path={after}", *own, "--trainer.max_steps=20")
    assert shaping("runs/tiny/version_3/checkpoints/last.ckpt")["trainer"].get("max_epochs") is None
    ran = run("test", f"--ckpt_path={after}", *own)
    assert ran.status == 0, ran.err
    assert "From the checkpoint's run: trainer.precision bf16-mixed.\n" in ran.out


def test_a_run_resumed_by_its_checkpoint_alone_ends_like_one_that_went_on(monkeypatch: pytest.MonkeyPatch):
    """Stopped after the second of three epochs, with accumulation that would else be lost."""
    words = ("--trainer.max_epochs=3", "--trainer.accumulate_grad_batches=2", "--data.rows=40")
    assert run("fit", "--config=tiny.yaml", *words).status == 0
    # The batch before an epoch's end is alone in its step; a second signal would end this process.
    stop = "--trainer.callbacks+={class_path: support.methods.tiny.Sender, init_args: {name: SIGTERM, step: 5}}"
    assert run("fit", "--config=tiny.yaml", *words, stop).status == 143
    stopped = "runs/tiny/version_2/checkpoints/last.ckpt"
    assert torch.load(stopped, weights_only=True)["global_step"] < 9
    own = ("--model=TinyModel", "--data=TinyData", "--data.rows=40")
    ran = run("fit", f"--ckpt_path={stopped}", *own)
    assert ran.status == 0, ran.err
    first, second = (
        torch.load(f"runs/tiny/version_{version}/checkpoints/last.ckpt", weights_only=True) for version in (1, 3)
    )
    assert first["global_step"] == second["global_step"] == 9
    for name, value in first["state_dict"].items():
        assert torch.equal(value, second["state_dict"][name]), name


def test_settings_in_a_checkpoint_lead_to_no_folder_outside_and_to_no_code():
    content = torch.load(CHECKPOINT, weights_only=True)
    evil = {"class_path": "subprocess.Popen"}
    bad = {"precision": evil, "callbacks": [evil], "max_time": evil, "max_epochs": 4}
    content["vlightning_run"] = {"trainer": bad, "name": "../outside"}
    torch.save(content, "evil.ckpt")
    found = read_saved_run(Path("evil.ckpt"))
    assert found.trainer == {"max_epochs": 4}
    assert found.name is None


def test_last_is_of_the_newest_run_of_the_name():
    assert run("fit", "--config=tiny.yaml").status == 0
    assert run("fit", "--config=tiny.yaml", "--trainer.logger.name=other").status == 0
    Path("runs/tiny/version_9").mkdir()  # of a run that has not saved yet
    os.utime(CHECKPOINT, (2e9, 2e9))
    ran = resume(checkpoint="last")
    assert ran.status == 0, ran.err
    assert f"Checkpoint: {CHECKPOINT}, the newest of its run." in ran.out
    assert torch.load("runs/tiny/version_10/checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert "the best of its run" in resume("--trainer.logger.name=other", checkpoint="best").out


def test_last_without_a_run_is_refused():
    ran = resume("--trainer.logger.name=none", checkpoint="last")
    assert ran.status == 2
    assert "checkpoint in 'runs/none'" in ran.sentence
    assert not Path("runs/none").exists()


@pytest.mark.parametrize(("subcommand", "which"), [("fit", "last.ckpt"), ("test", "best-step2.ckpt")])
def test_a_runs_folder_stands_for_its_checkpoint_and_an_evaluation_writes_beside_it(subcommand: str, which: str):
    ran = run(subcommand, "--ckpt_path=runs/tiny/version_0", "--config=tiny.yaml", "--trainer.max_epochs=2")
    assert ran.status == 0, ran.err
    assert f"Checkpoint: runs/tiny/version_0/checkpoints/{which}" in ran.out
    folder = "runs/tiny/version_1" if subcommand == "fit" else "runs/tiny/version_0_test_0"
    assert f"Run folder: {folder}\n" in ran.out
    assert Path(folder, "config.yaml").is_file()


def test_an_evaluation_finds_the_runs_folder_where_it_was_moved_to_and_a_typed_place_wins():
    Path("runs/tiny/version_0").rename("kept")
    own = ("--ckpt_path=kept/checkpoints/last.ckpt", "--model=TinyModel", "--data=TinyData")
    assert "Run folder: kept_predict_0\n" in run("predict", *own).out
    assert "Run folder: runs/mine/version_0\n" in run("validate", *own, "--trainer.logger.name=mine").out


@pytest.mark.parametrize("name", ["tiny", "two words"])
def test_what_fit_says_in_the_end_can_be_typed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in another folder, for a class of the user's own, which its checkpoint does not build alone."""
    ran = run("fit", "--config=tiny.yaml", f"--trainer.logger.name={name}")
    run_dir = f"runs/{name}/version_{1 if name == 'tiny' else 0}"
    lines = ran.out.splitlines()
    best_file = f"{run_dir}/checkpoints/best-step2.ckpt"
    content = torch.load(best_file, weights_only=True)
    (best,) = [state for name, state in content["callbacks"].items() if name.startswith("BestCheckpoint")]
    value = f"{float(best['best_model_score']):.4g}"
    assert f"Best val/recall_mean: {value} at step 2, in {best_file}" in lines
    assert f"Last checkpoint: of step 2, in {run_dir}/checkpoints/last.ckpt" in lines
    (following,) = [line for line in lines if line.startswith("Next: vlightning ")]
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    ran = run(*shlex.split(following)[2:])
    assert ran.status == 0, ran.err
    results = json.loads((tmp_path / f"{run_dir}_test_0/metrics.json").read_text())
    assert results["checkpoint"] == str(tmp_path / best_file)


def test_a_checkpoint_of_another_class_is_one_sentence():
    ran = resume("--model=ALBEFModule")
    assert ran.status == 2
    assert "Expected a checkpoint of ALBEFModule" in ran.sentence


def test_a_config_that_states_the_length_of_its_run_fits_prints_and_resumes(tmp_path: Path):
    tiny_config(tmp_path, "stated.yaml", f"schedule: {{steps: 20, batch: 4, unit: images}}\n{CONFIG}")
    printed = run("fit", "--config=stated.yaml", "--print_config")
    assert printed.status == 0, printed.err
    assert "schedule" not in printed.out
    ran = run("fit", "--config=stated.yaml")
    assert ran.status == 0, ran.err
    folder = Path("runs/stated/version_0")
    assert "schedule" not in yaml.safe_load((folder / "config.yaml").read_text())
    ran = run("fit", "--config=stated.yaml", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert ran.status == 0, ran.err
    checkpoint = torch.load("runs/stated/version_1/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 4
    ran = run("validate", "--config=stated.yaml", "--ckpt_path=last")
    assert ran.status == 0, ran.err
