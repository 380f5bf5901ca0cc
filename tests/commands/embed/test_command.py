"""`vlightning embed` as it is typed: what it writes, and that a killed, repeated or divided command writes the same."""

import json
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image

from support.data.colors import read_table, write_colors, write_table
from support.methods.encoders import IMAGES, write_towers
from support.methods.published import LENGTH, write_published
from support.runs.command_line import run
from support.runs.forked import VLIGHTNING, run_script
from vlightning.datamodules.stores.store import FeatureStore

KILLED = """
import os, signal
from vlightning.cli import main
from vlightning.commands.embed import passes

write = passes.write_shard
def write_and_die(path, rows):
    write(path, rows)
    if path.name == "00000002.arrow":
        os.kill(os.getpid(), signal.SIGKILL)
passes.write_shard = write_and_die
main()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("embed"))


def words(files, output, *more):
    given = {"--shard_size": 6, "--batch_size": 4, "--num_workers": 0, "--accelerator": "cpu"}
    options = [f"{name}={value}" for name, value in given.items() if not any(word.startswith(name) for word in more)]
    data = f"--data.train={files}/pairs.csv"
    return ["embed", f"local-dir:{files}/model", data, f"--output={output}", *options, *more]


def content(folder):
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def test_features_are_those_of_open_clip_and_the_manifest_says_of_what(files, tmp_path):
    ran = run(*words(files, tmp_path / "store"))
    assert ran.status == 0, ran.err
    assert "32 rows in 6 shards" in ran.out
    store = FeatureStore(tmp_path / "store")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{files}/model")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{files}/model", context_length=LENGTH)
    rows = read_table(files / "pairs.csv")
    with torch.no_grad():
        images = model.eval().encode_image(torch.stack([preprocess(Image.open(files / name)) for name, _ in rows]))
        texts = model.encode_text(tokenizer([caption for _, caption in rows]))
    for row, (name, caption) in enumerate(rows):
        torch.testing.assert_close(store.image(row), images[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(store.text(row, caption), texts[row], atol=1e-5, rtol=1e-5)
        assert store.names()[row] == str(files / name)
    assert store.text(0, "another caption") is None
    assert store.usable().all()
    assert store.manifest["data"]["rows"] == [32]
    assert (store.width("image"), store.width("text"), store.views) == (16, 16, 0)


def test_a_killed_command_goes_on_to_the_same_bytes(files, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    whole = words(files, tmp_path / "whole", "--views=2")
    assert run(*whole).status == 0
    died = run_script([tmp_path / "killed.py", *words(files, tmp_path / "killed", "--views=2")], cwd=tmp_path)
    assert died.returncode == -signal.SIGKILL
    before = content(tmp_path / "killed")
    assert sorted(before) == ["00000000.arrow", "00000001.arrow", "00000002.arrow", "manifest.json"]
    assert json.loads(before["manifest.json"])["complete"] is False
    assert "Expected a complete store" in use(files, tmp_path / "killed").sentence
    times = {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in before if name.endswith(".arrow")}
    again = run(*words(files, tmp_path / "killed", "--views=2"))
    assert again.status == 0, again.err
    assert "Embedding 14 of 32 rows." in again.out + again.err
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert times == {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in times}


def use(files, store):
    return run(
        *("fit", "--model=CLIPModule", f"--model.weights={files}/model", "--model.tuning.lock_image=all"),
        *("--data=ImageTextDataModule", f"--data.train={files}/pairs.csv", "--data.tokenizer=clip"),
        *("--data.vocab_size=49408", f"--data.max_tokens={LENGTH}", f"--data.store={store}", "--data.num_workers=0"),
        *("--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.logger=false", "--data.batch_size=8"),
    )


@pytest.mark.slow
def test_two_processes_write_the_bytes_of_one(files, tmp_path):
    for folder, devices in (("one", 1), ("two", 2)):
        command = [VLIGHTNING, *words(files, tmp_path / folder, f"--devices={devices}", "--num_workers=1")]
        done = run_script(command, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("32 rows in 6 shards") == 1
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_rows_that_cannot_be_used_are_kept_by_cause(files, tmp_path):
    rows = read_table(files / "pairs.csv")
    rows = [(f"{files}/{name}", caption) for name, caption in rows]
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows[3] = (str(tmp_path / "broken.png"), "a text")
    rows[7] = (str(tmp_path / "gone.png"), "another")
    rows[9] = (rows[9][0], " ")
    write_table(tmp_path / "pairs.csv", rows)
    ran = run(
        *words(tmp_path, tmp_path / "store")[:1], f"local-dir:{files}/model", *words(tmp_path, tmp_path / "s")[2:]
    )
    assert ran.status == 0, ran.err
    assert "2 of them unusable (not an image: 1, missing file: 1)" in ran.out
    store = FeatureStore(tmp_path / "s")
    assert store.fault(3) == "not an image"
    assert store.fault(7) == "missing file"
    assert store.usable().sum() == 30
    assert store.text(3, "a text") is not None
    assert store.manifest["counts"] == {"unusable": {"not an image": 1, "missing file": 1}, "captions": 31}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--views=3"], "Expected images.preprocessing"),
        (["--shard_size=7"], "Expected data.shard_size 6"),
        (["--of=texts"], "Expected images"),
        (["--views=-1"], "Expected at least 0 after --views, got -1"),
        (["--split=test"], "Expected rows of images with texts in the test split, got none"),
        (["--data.streaming=true", "--data.samples_per_epoch=32"], "got a stream"),
        (["--data.train=gone.csv"], "gone.csv"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(files, stored, more, sentence):
    before = content(stored)
    command = [word for word in words(files, stored, *more) if word in more or more[0].split("=")[0] not in word]
    assert sentence in run(*command).sentence
    assert content(stored) == before


@pytest.fixture(scope="module")
def stored(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "store"
    assert run(*words(files, folder)).status == 0
    return folder


def test_without_a_model_the_locked_towers_of_the_config_run(files, stored, tmp_path):
    common = ["--model=CLIPModule", f"--model.weights={files}/model", "--data=ImageTextDataModule"]
    common += ["--data.tokenizer=clip", "--data.vocab_size=49408", f"--data.max_tokens={LENGTH}"]
    given = ["embed", *common, *words(files, tmp_path / "store")[2:]]
    assert "or a config of one with locked towers" in run(*given).sentence
    ran = run(*given, "--model.tuning.lock_text=all")
    assert ran.status == 0, ran.err
    both = FeatureStore(stored)
    store = FeatureStore(tmp_path / "store")
    assert store.sides["image"] is None
    assert store.manifest["model"]["text"] == both.manifest["model"]["text"]
    for row, (_, caption) in enumerate(read_table(files / "pairs.csv")):
        torch.testing.assert_close(store.text(row, caption), both.text(row, caption), atol=1e-5, rtol=1e-5)
    assert "got --of images: lock that tower" in run(*given, "--model.tuning.lock_text=all", "--of=images").sentence


def test_a_config_with_a_new_projection_goes_on_to_the_same_bytes(files, tmp_path):
    """The projection is random in each process, and not a part of what is stored."""
    folder = write_towers(tmp_path / "towers")
    towers = {"image": {"name": IMAGES, "weights": f"{folder}/image.safetensors"}, "text": {"name": f"{folder}/text"}}
    config = ["--model=CLIPModule", f"--model.model={json.dumps(towers)}", "--model.tuning.lock_image=all"]
    config += ["--data=ImageTextDataModule", "--data.image_size=32", "--data.max_tokens=8"]
    given = ["embed", *config, *words(files, tmp_path / "store")[2:]]
    assert run(*given, "--seed_everything=1").status == 0
    whole = content(tmp_path / "store")
    (tmp_path / "store/00000004.arrow").unlink()
    manifest = json.loads(whole["manifest.json"])
    (tmp_path / "store/manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    ran = run(*given, "--seed_everything=2")
    assert ran.status == 0, ran.err
    assert content(tmp_path / "store") == whole


def test_a_disk_that_is_too_small_is_reported_before_writing(files, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 20_000))
    expected = "Expected room for about 131 KB"  # 4 bytes x 512 numbers x 32 rows, of an image and a text
    assert run(*words(files, tmp_path / "store")).sentence.startswith(expected)
    assert list((tmp_path / "store").iterdir()) == []


def test_a_folder_with_other_files_and_other_weights_are_refused(files, stored, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "with other files" in run(*words(files, tmp_path)).sentence
    write_published(tmp_path / "weights", seed=8)
    command = [word.replace(f"{files}/model", f"{tmp_path}/weights") for word in words(files, stored)]
    assert "Expected model.image" in run(*command).sentence
