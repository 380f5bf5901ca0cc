"""The command line as users run it: four subcommands, several configs, resume, and one folder for each run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning_utilities.core.imports import RequirementCache

from support.methods.albef import tiny_albef
from support.runs.command_line import run, tiny_config
from support.runs.forked import run_script
from vlightning.callbacks.checkpoints.checkpoint_io import BackgroundWriter
from vlightning.commands.cli.lightning_cli import VLightningCLI
from vlightning.commands.cli.run_report import warn_of_random_weights

ROOT = Path(__file__).resolve().parents[3]
PLAIN_CLASSIFIER = ("--config", "configs/cocord/vanilla.yaml", "--data", "ShapeClassesDataModule")
TINY_CLI = str(ROOT / "tests" / "support" / "runs" / "tiny_cli.py")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


def fit(*words: str):
    ran = run("fit", "--config", "tiny.yaml", *words)
    assert ran.status == 0, ran.err
    return ran


def load(path: str | Path) -> dict:
    return torch.load(path, weights_only=True)


def test_fit_writes_logs_both_checkpoints_and_a_config():
    fit()
    folder = Path("runs/tiny/version_0")
    assert (folder / "checkpoints/last.ckpt").is_file()
    assert [p.name for p in (folder / "checkpoints").glob("best*")] == ["best-step2.ckpt"]
    assert list(folder.glob("events.out.tfevents.*"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["dim"] == 5


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_the_other_subcommands_run_from_a_checkpoint(subcommand: str):
    fit()
    ran = run(subcommand, "--config", "tiny.yaml", "--ckpt_path", "runs/tiny/version_0/checkpoints/last.ckpt")
    assert ran.status == 0, ran.err
    assert "random weights" not in ran.err


def test_main_returns_none_because_that_becomes_the_exit_status():
    from vlightning.cli import main

    assert main(["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "true"]) is None


def test_later_configs_and_options_override_earlier_ones(tmp_path: Path):
    tiny_config(tmp_path, "more.yaml", "model: {init_args: {dim: 7}}\ntrainer: {max_epochs: 2}\n")
    fit("--config", "more.yaml", "--trainer.max_epochs", "3")
    saved = yaml.safe_load(Path("runs/tiny/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["dim"] == 7
    assert saved["model"]["init_args"]["kind"] == "plain"
    assert saved["trainer"]["max_epochs"] == 3
    assert load("runs/tiny/version_0/checkpoints/last.ckpt")["epoch"] == 2


def test_print_config_prints_a_config_that_runs():
    ran = run("fit", "--config", "tiny.yaml", "--model.dim", "6", "--print_config")
    assert ran.status == 0
    Path("printed.yaml").write_text(ran.out)
    assert yaml.safe_load(ran.out)["model"]["init_args"]["dim"] == 6
    assert run("fit", "--config", "printed.yaml").status == 0
    assert not Path("runs/tiny").exists()


def test_the_saved_config_reproduces_the_run():
    fit("--model.dim", "6", "--seed_everything", "5", "--data.vocab_size", "12")
    ran = run("fit", "--config", "runs/tiny/version_0/config.yaml")
    assert ran.status == 0, ran.err
    first, second = (load(f"runs/tiny/version_{n}/checkpoints/last.ckpt") for n in (0, 1))
    assert second["hyper_parameters"] == first["hyper_parameters"]
    assert second["hyper_parameters"]["vocab_size"] == 12
    for name, weight in first["state_dict"].items():
        assert torch.equal(weight, second["state_dict"][name])


def test_default_callbacks_are_kept_beside_the_users():
    fit("--trainer.callbacks+=UserCallback", "--trainer.callbacks.every=7")
    folder = Path("runs/tiny/version_0")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["trainer"]["callbacks"][0]["init_args"]["every"] == 7
    assert (folder / "checkpoints/last.ckpt").is_file()
    assert any(key.startswith("LastCheckpoint") for key in load(folder / "checkpoints/last.ckpt")["callbacks"])


@pytest.mark.parametrize(
    "words",
    [
        ("--trainer.logger", "false"),
        ("--trainer.logger", "CSVLogger"),
        ("--trainer.enable_checkpointing", "false"),
        ("--trainer.limit_val_batches", "0"),
        ("--trainer.fast_dev_run", "true"),
        ("--trainer.callbacks+=RichProgressBar", "--trainer.enable_progress_bar=true"),
        ("--trainer.callbacks+=LearningRateMonitor",),
        ("--trainer.plugins", "lightning.pytorch.plugins.AsyncCheckpointIO"),
        ("--model", "NoVocabularyModel"),
    ],
    ids=" ".join,
)
def test_the_users_choice_replaces_defaults(words: tuple[str, ...]):
    fit(*words)


def test_an_option_or_a_config_has_checkpoints_written_while_the_training_goes_on(tmp_path, monkeypatch):
    written = []
    submit = BackgroundWriter.submit
    monkeypatch.setattr(BackgroundWriter, "submit", lambda *args, **kwargs: written.append(submit(*args, **kwargs)))
    plugin = "{class_path: AtomicCheckpointIO, init_args: {asynchronous: true}}"
    tiny_config(tmp_path, "one.yaml", f"trainer: {{plugins: {plugin}}}")
    tiny_config(tmp_path, "list.yaml", f"trainer: {{plugins: [{plugin}]}}")
    typed = ("--trainer.plugins", "AtomicCheckpointIO", "--trainer.plugins.asynchronous", "true")
    for number, words in enumerate((typed, ("--config", "one.yaml"), ("--config", "list.yaml"), ())):
        written.clear()
        fit(*words)
        assert bool(written) == bool(words), words
        assert load(f"runs/tiny/version_{number}/checkpoints/last.ckpt")["global_step"] == 2


def test_a_config_shipped_with_the_package_is_found_from_any_folder():
    ran = run("fit", "--config", "configs/albef/tiny.yaml", "--print_config")
    assert ran.status in (0, 2)  # a fragment may leave the data open
    assert "does not exist" not in ran.err
    assert "'configs/albef/tiny.yaml'" in run("fit", "--config", "configs/albef/tyni.yaml").sentence


def test_a_user_error_during_the_run_is_one_sentence_with_status_1():
    ran = fit_failing("sentence")
    assert ran.status == 1
    assert "This cannot be trained; use another." in ran.sentence


def test_a_user_error_in_a_constructor_is_one_sentence():
    ran = run("fit", *PLAIN_CLASSIFIER, "--model.student=resnet21")
    assert ran.status == 1
    assert "got 'resnet21': did you mean 'resnet32'?" in ran.sentence
    refused = run("fit", *PLAIN_CLASSIFIER, "--data.batch_size=0").sentence
    assert refused.startswith("Expected data.batch_size of at least 1, got 0")


def test_a_model_larger_than_memory_is_one_sentence():
    ran = run("fit", "--config", "tiny.yaml", "--model.dim", str(10**15))
    assert ran.status == 1
    assert ran.sentence.startswith("There is not enough memory to build the model, for 11,175,871 GiB more: lower")


def test_a_logger_with_a_missing_package_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=999"))
    ran = run("fit", "--config", "tiny.yaml", "--trainer.logger", "WandbLogger")
    assert ran.status == 1
    assert ran.sentence.startswith("WandbLogger needs the package 'wandb', which is not installed: run pip install ")


def test_a_config_may_stand_before_the_subcommand(tmp_path: Path):
    """A plain config counts as if given after the subcommand; one with sections for subcommands is kept."""
    tiny_config(tmp_path, "parts.yaml", "fit: {model: {class_path: TinyModel}, trainer: {max_epochs: 2}}\n")
    shown = run("--config", "tiny.yaml", "--config", "parts.yaml", "fit", "--model.dim=6", "--print_config")
    assert shown.status == 0, shown.err
    config = yaml.safe_load(shown.out)
    assert config["model"]["init_args"]["dim"] == 6
    assert config["data"]["init_args"]["batch_size"] == 8
    ran = run("--config", "tiny.yaml", "fit", "--trainer.max_steps=1")
    assert ran.status == 0, ran.err
    assert Path("runs/tiny/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_evaluation_of_random_weights_warns(subcommand: str):
    ran = run(subcommand, "--config", "tiny.yaml", "--trainer.logger=false")
    assert ran.status == 0, ran.err
    (warning,) = [line for line in ran.err.splitlines() if line.startswith("vlightning: warning: ")]
    assert f"{subcommand} was given no checkpoint, so TinyModel has the random weights" in warning
    assert "--ckpt_path" in warning


def test_evaluation_of_given_weights_does_not_warn(capsys: pytest.CaptureFixture):
    for module in (tiny_albef(weights="trained.ckpt"), LightningModule()):  # the second one is not for training
        warn_of_random_weights("test", module)
    assert not capsys.readouterr().err
    warn_of_random_weights("test", tiny_albef())
    assert "ALBEFModule has the random weights" in capsys.readouterr().err


def test_an_error_in_every_process_is_printed_once():
    words = ["fit", "--config", "tiny.yaml", "--model=FailingModel", "--model.how=sentence"]
    done = run_script([TINY_CLI, *words, "--trainer.devices=2", "--trainer.strategy=ddp"], env=one_thread())
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("This cannot be trained; use another.") == 1, done.stderr
    assert done.stderr.count("vlightning: error: ") == 1, done.stderr


def test_an_internal_error_in_a_constructor_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vlightning.lightning_modules.cocord.module.ClassificationEvaluation", lambda: int("x"))
    with pytest.raises(ValueError, match="invalid literal for int"):
        run("fit", *PLAIN_CLASSIFIER)


def test_debug_keeps_the_traceback():
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException):
        fit_failing("sentence", "--debug")


def test_an_internal_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        fit_failing("defect")


def fit_failing(how: str, *words: str):
    return run("fit", "--config", "tiny.yaml", "--model=FailingModel", f"--model.how={how}", *words)


def one_thread() -> dict[str, str]:
    """For the processes that Lightning's launcher starts."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Start an interpreter: what is printed at import is part of the result."""
    return subprocess.run([sys.executable, *command], env=one_thread(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [[str(ROOT / "cli.py")], ["-m", "vlightning.cli"]], ids=["file", "module"])
def test_help_and_version_from_the_file_and_the_module(command: list[str]):
    for option, beginning in (("--help", "usage: "), ("--version", "vlightning 0.")):
        done = run_script([*command, option])
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(beginning)
        assert (len(done.stdout.splitlines()), done.stderr) == (1, "") or option == "--help"


@pytest.mark.slow
def test_a_started_interpreter_prints_one_sentence_and_the_exit_status_reaches_the_shell():
    done = start(str(ROOT / "cli.py"), "fit", "--trainer.max_epoch", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "vlightning: error: Expected a known option, got '--trainer.max_epoch'"
    )
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_two_processes_share_one_run_folder():
    words = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    done = run_script([TINY_CLI, "fit", "--config", "tiny.yaml", *words], env=one_thread(), executes=True)
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    assert [p.name for p in Path("runs/tiny").iterdir()] == ["version_0"]
    assert load("runs/tiny/version_0/checkpoints/last.ckpt")["global_step"] == 1


@pytest.mark.parametrize(
    ("words", "built"),
    [
        (["fit", "--config", "x.yaml"], ["fit"]),
        (["predict"], ["predict"]),
        (["fti"], ["fit", "validate", "test", "predict"]),
        (["--config", "x.yaml", "fit"], ["fit", "validate", "test", "predict"]),
        ([], ["fit", "validate", "test", "predict"]),
    ],
)
def test_the_typed_subcommand_alone_has_a_parser(words, built):
    command_line = VLightningCLI.__new__(VLightningCLI)
    command_line.words = words
    assert list(command_line.subcommands()) == built
