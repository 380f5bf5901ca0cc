"""A secret in a data URL is used for reads, and is in no file and no output of a run, an export or an evaluation."""

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from support.data.images import draw_image
from support.data.web_server import web_server
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.common.shown import VARIABLE
from vlightning.common.urls import hidden, keep, whole
from vlightning.datamodules import ImageTextDataModule

PASSWORD, SIGNATURE = "PLANTEDPASSWORD", "X-Amz-Credential=AKIA/s3/aws4&X-Amz-Signature=PLANTEDSIGNATURE"
DATA = """\
data:
  class_path: ImageTextDataModule
  init_args:
    validation: {path: "%s"}
    image_size: 32
    batch_size: 8
    num_workers: 1
    vocab_size: 120
    max_tokens: 12
    read_retries: 0
model:
  init_args:
    text: {depth: 1, width: 48, ffn_width: 48, max_positions: 16}
    vision: {depth: 1, width: 48}
    contrast: {queue_size: 16}
trainer: {accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""


@pytest.fixture(autouse=True)
def no_urls(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def pairs(tmp_path):
    """A folder of a list with its images."""
    folder = tmp_path / "served"
    (folder / "data").mkdir(parents=True)
    for number in range(16):
        draw_image(number).save(folder / f"data/{number}.png")
    rows = [{"image": f"{number}.png", "caption": f"image number {number}"} for number in range(16)]
    (folder / "data/t.json").write_text(json.dumps(rows))
    return folder


def files_with_secrets(folder):
    """The files, and names of files, in which a planted secret stands, also packed in a checkpoint."""
    found = []
    for path in (each for each in folder.rglob("*") if each.is_file()):
        contents = [path.read_bytes(), str(path).encode()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                contents += [packed.read(name) for name in packed.namelist()]
        found += [path for content in contents if b"PLANTED" in content]
    return found


@pytest.mark.slow
def test_a_planted_secret_is_in_no_file_and_no_output(pairs, tmp_path, monkeypatch, capfd):
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    with web_server(pairs, f"bob:{PASSWORD}", {"t.json": SIGNATURE}) as address:
        url = f"http://bob:{PASSWORD}@{address}/data/t.json?{SIGNATURE}"
        config = tmp_path / "data.yaml"
        config.write_text(DATA % url)

        def vlightning(*words):
            monkeypatch.setattr(sys, "argv", ["vlightning", *map(str, words)])
            return run(*words)

        words = ("fit", "--config", "configs/albef/tiny.yaml", "--config", config, "--data.train", url)
        ran = vlightning(*words, "--trainer.max_steps", 2)
        assert ran.status == 0, ran.err
        assert ran.out.count(f"in the environment variable {VARIABLE}.") == 1
        command = json.loads(Path("runs/albef/tiny_data/version_0/environment.json").read_text())["command"]
        assert command[-3:-1] == [f"http://{address}/data/t.json", "--trainer.max_steps"]
        last = "runs/albef/tiny_data/version_0/checkpoints/last.ckpt"
        assert vlightning("export", last, "exported").status == 0
        assert f"| train | http://{address}/data/t.json |" in Path("exported/README.md").read_text()
        assert vlightning("validate", "--ckpt_path", last).status == 0  # this process knows the secret

        os.environ[VARIABLE] = ""  # as in another process
        ran = vlightning("fit", "--ckpt_path", last, "--trainer.max_steps", 4)
        assert ran.status == 1
        assert f"Expected the user or the query of 'http://{address}/data/t.json'" in ran.sentence
        assert VARIABLE in ran.sentence
        os.environ[VARIABLE] = f"https://elsewhere/?x {url}"
        for config_words in ((), ("--config", "runs/albef/tiny_data/version_0/config.yaml")):
            ran = vlightning("fit", "--ckpt_path", last, *config_words, "--trainer.max_steps", 4)
            assert ran.status == 0, ran.err
        assert len(list(Path("runs").rglob("last.ckpt"))) == 3

        os.environ[VARIABLE] = ""
        wrong = f"http://bob:{PASSWORD}2@{address}/data/t.json?{SIGNATURE}"
        ran = vlightning(*words[:-1], wrong, "--data.validation", wrong)
        assert f"Expected a file at 'http://{address}/data/t.json', got none" in ran.sentence
        os.environ[VARIABLE] = ""
        assert "got 'much'" in vlightning(*words, "--data.batch_size", "much").sentence
    assert files_with_secrets(place) == files_with_secrets(tmp_path / "cache") == []
    output = capfd.readouterr()
    assert "Last checkpoint: of step 4" in output.out
    assert "PLANTED" not in output.out + output.err


def test_a_datamodule_reads_a_list_and_its_images_with_secrets_that_it_does_not_hold(pairs):
    with web_server(pairs, f"bob:{PASSWORD}", {"t.json": SIGNATURE}) as address:
        url = f"http://bob:{PASSWORD}@{address}/data/t.json?{SIGNATURE}"
        data = ImageTextDataModule(train=url, image_size=16, batch_size=8, num_workers=0, read_retries=0)
        assert data.hparams.train == f"http://removed@{address}/data/t.json?removed"
        data.setup("fit")
        assert sum(len(batch["image"]) for batch in data.train_dataloader()) == 16
        assert not data.account("train").causes
        assert "PLANTED" not in f"{vars(data)} {vars(data.pairs)} {vars(data._opened('train'))}"


def test_reads_get_the_secrets_of_the_file_or_of_its_folder():
    lists = ["http://bob:a@host/data/t.json?x=1", {"path": "http://eve:b@host/data/more/t.json"}]
    names = ["http://removed@host/data/t.json?removed", {"path": "http://removed@host/data/more/t.json"}]
    assert keep(lists) == hidden(lists) == keep(names) == names
    assert whole(names[0]) == lists[0]
    assert whole("http://removed@host/data/1.png") == "http://bob:a@host/data/1.png"
    assert whole("http://removed@host/data/more/1.png") == "http://eve:b@host/data/more/1.png"
    assert whole("http://host/data/1.png") == "http://host/data/1.png"
    for unknown in (
        "http://removed@other/1.png",
        "http://host/data/t.json?removed",
        "http://removed@host/t.json?removed",
    ):
        with pytest.raises(UserError, match=f"in the environment variable {VARIABLE}, got none"):
            whole(unknown)
    keep("http://bob:a@host/data/t.json?x=2")  # a signature that was made anew
    assert whole(names[0]) == "http://bob:a@host/data/t.json?x=2"


def test_urls_of_one_run_that_differ_in_their_secrets_only_are_refused():
    with pytest.raises(UserError, match=r"Expected one user and query of 'http://host/t.json', got two"):
        keep({"train": "http://host/t.json?version=1", "validation": ["http://host/t.json?version=2"]})


def test_other_settings_are_not_changed():
    value = {"a": torch.zeros(1), "b": (1, None, "a photo of http://x?y"), "c": "s3://bucket/shard-?.tar"}
    assert hidden(value) == value
