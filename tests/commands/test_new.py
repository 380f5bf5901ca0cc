"""`vlightning new method` writes a package that passes its own test, trains in every way, and is refused by name."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from support.runs.forked import run_script
from vlightning.callbacks import consolidate_checkpoint
from vlightning.cli import main

STRATEGIES = Path(__file__).resolve().parents[2] / "configs/strategy"


def new(capsys, *words):
    main(["new", *map(str, words)])
    return capsys.readouterr().out


def refused(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["new", *map(str, words)])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = new(capsys, "method", "two_means")
    return tmp_path / "two_means", printed


def test_what_is_written_is_named(written):
    folder, printed = written
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(line.strip() for line in printed.splitlines()[1:7])
    assert "vlightning fit --config two_means/quickstart.yaml" in printed
    for file in files:
        text = (folder / file).read_text()
        assert "$" not in text, file
    assert 'two_means = "two_means.module:TwoMeansModule"' in (folder / "pyproject.toml").read_text()


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_above_which_has_a_folder_of_its_name(written, tmp_path):
    folder, _ = written
    code = "from setuptools.build_meta import build_editable; build_editable({!r})".format(str(tmp_path / "built"))
    (tmp_path / "built").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    (wheel,) = (tmp_path / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); from two_means.module import TwoMeansModule"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_written_test_passes_and_fails_with_another_loss(written):
    folder, _ = written

    def tested():
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(folder / "src"), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=folder.parent, check=False)

    passed = tested()
    assert passed.returncode == 0, passed.stdout + passed.stderr
    module = folder / "src/two_means/module.py"
    module.write_text(module.read_text().replace("return (image_to_text + text_to_image) / 2", "return image_to_text"))
    assert "1 failed, 1 passed" in tested().stdout


@pytest.mark.slow
def test_two_processes_train_it_as_one_does(written):
    folder, _ = written
    weights = {}
    for name, batch, options in (
        ("one", 16, ()),
        ("ddp", 8, ("--config", STRATEGIES / "ddp.yaml", "--trainer.devices=2")),
        ("fsdp", 8, ("--config", STRATEGIES / "fsdp.yaml", "--trainer.devices=2")),
    ):
        words = ["fit", "--config", folder / "quickstart.yaml", "--data.length=64", "--data.eval_length=16"]
        words += [
            f"--data.batch_size={batch}",
            "--trainer.max_steps=3",
            # AdamW would turn the rounding of gradients near zero into whole steps.
            *("--model.optimizer=SGD", "--model.optimizer.lr=0.1"),
            *options,
            "--trainer.callbacks+=TQDMProgressBar",  # the only bar that is shown without a terminal
        ]
        words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder / name}"]
        done = run_script(["-m", "vlightning.cli", *map(str, words)], cwd=folder / "src")
        assert done.returncode == 0, done.stderr
        assert "train/loss=" in done.stdout + done.stderr  # of the progress bar
        (checkpoint,) = (folder / name).rglob("last.ckpt")
        if checkpoint.is_dir():
            consolidate_checkpoint(checkpoint, folder / "whole.ckpt")
            checkpoint = folder / "whole.ckpt"
        weights[name] = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name in ("ddp", "fsdp"):
        torch.testing.assert_close(weights[name], weights["one"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Two", "2d", "class", "a-b", "a/b"])
def test_a_name_that_is_no_package_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "Expected a name of lower-case letters" in refused(capsys, "method", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["vlightning", "torch", "json"])
def test_the_name_of_an_installed_package_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "Expected a name that no installed package has" in refused(capsys, "method", name)
    assert list(tmp_path.iterdir()) == []


def test_the_printed_commands_quote_a_folder_with_a_space(tmp_path, capsys):
    printed = new(capsys, "method", "two_means", "--folder", tmp_path / "my methods")
    assert printed.splitlines()[-1] == f"  pytest '{tmp_path}/my methods'"


def test_a_folder_with_files_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    assert "Expected a new or an empty folder" in refused(capsys, "method", "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]
    new(capsys, "method", "taken", "--folder", tmp_path / "other")
    assert (tmp_path / "other/src/taken/module.py").is_file()
