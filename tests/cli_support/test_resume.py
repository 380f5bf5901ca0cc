"""What is typed wins over the checkpoint; what is not typed comes from it; the seed is the checkpoint's."""

from pathlib import Path

import pytest
import torch
import yaml

from support.command_line import run, tiny_config

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
    assert "its hyper-parameters are not used" in ran.err


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
    assert "no `state_dict`" in resume(checkpoint="other.ckpt").sentence


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
    assert "no whole checkpoint" in ran.sentence
