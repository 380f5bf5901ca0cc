"""Figures and settings in TensorBoard, W&B (offline) and beside a CSV log, and the W&B run of a requeued job."""

import json
import subprocess
from pathlib import Path

import pytest
import wandb
import yaml
from lightning.pytorch import Callback
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.runs.command_line import run, tiny_config
from support.runs.slurm import pretend_slurm
from vlightning.callbacks.figures.evaluation import log_figure
from vlightning.commands.cli.run_config import environment

OFFLINE = ("--trainer.logger=WandbLogger", "--trainer.logger.offline=true")


class Draws(Callback):
    """Draws a red square after a validation."""

    def on_validation_end(self, trainer, pl_module) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            figure = Figure(figsize=(1, 1), dpi=20, facecolor="red")
            log_figure(trainer, "val/square", figure)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


def fit(*words: str):
    ran = run("fit", "--config=tiny.yaml", f"--trainer.callbacks={__name__}.Draws", *words)
    assert ran.status == 0, ran.err
    return Path("runs/tiny")


def is_red(file: Path) -> bool:
    with Image.open(file) as image:
        return image.size == (20, 20) and image.getpixel((10, 10)) == (255, 0, 0)


def test_beside_a_csv_log_a_figure_is_a_file():
    folder = fit("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs") / "version_0"
    assert [file.name for file in (folder / "figures/val").iterdir()] == ["square-step2.png"]
    assert is_red(folder / "figures/val/square-step2.png")


def test_tensorboard_shows_figure_settings_and_environment():
    folder = fit() / "version_0"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Images("val/square")] == [2]
    assert {"config/text_summary", "environment/text_summary"} <= {*events.Tags()["tensors"]}
    (event,) = events.Tensors("config/text_summary")
    shown = yaml.safe_load(event.tensor_proto.string_val[0])
    assert shown["model"]["init_args"]["vocab_size"] == 10  # taken from the data
    kept = json.loads((folder / "environment.json").read_text())
    assert kept["git"] is None  # no repository
    assert {"vlightning", "torch", "lightning"} <= kept["packages"].keys()


def test_a_requeued_job_goes_on_in_the_same_wandb_run(monkeypatch, tmp_path):
    pretend_slurm(monkeypatch, tmp_path)
    folder = fit(*OFFLINE) / "slurm_41"
    number = (folder / ".wandb_id").read_text()
    (drawn,) = folder.glob("wandb/offline-run-*/files/media/images/val/square_*.png")
    assert is_red(drawn)
    assert {file.name for file in (folder / "checkpoints").iterdir()} == {"best-step2.ckpt", "last.ckpt"}
    wandb.finish()  # as the end of the process does
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    fit(*OFFLINE, "--trainer.max_epochs=2")
    names = [path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")]
    assert names == [number, number]
    assert (folder / "environment-1.json").is_file()
    wandb.finish()
    pretend_slurm(monkeypatch, tmp_path, job=42)
    other = fit(*OFFLINE, "--trainer.logger.id=mine") / "slurm_42"
    assert not (other / ".wandb_id").exists()
    assert [path.name.rpartition("-")[2] for path in other.glob("wandb/offline-run-*")] == ["mine"]
    wandb.finish()


def test_wandb_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("vlightning.commands.cli.run_folder.find_spec", lambda name: None)
    ran = run("fit", "--config=tiny.yaml", *OFFLINE)
    assert "Expected the package wandb" in ran.sentence
    assert "pip install 'vlightning[wandb]'" in ran.sentence
    assert not Path("runs").exists()


def test_the_state_of_git_is_the_commit_and_the_changed_files(monkeypatch):
    assert environment(Path.cwd())["git"] is None
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "tiny.yaml"), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", *words], check=True)
    found = environment(Path.cwd())["git"]
    assert found["changed"] == []
    assert len(found["commit"]) == 40
    Path("tiny.yaml").write_text("")
    assert environment(Path.cwd())["git"]["changed"] == ["tiny.yaml"]
    monkeypatch.setenv("PATH", "")
    assert environment(Path.cwd())["git"] is None
