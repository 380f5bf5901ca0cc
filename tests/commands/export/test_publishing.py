"""`vlightning push`, and reading by name, with a local server in place of the hub."""

import re
import shutil

import pytest
import torch

from support.data.hub_server import READS_ONLY, TOKEN, Hub, local_hub, set_hub
from support.methods.published import tiny_clip
from support.runs.command_line import run
from vlightning.commands.export import from_pretrained
from vlightning.common.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("exported") / "my-clip"
    tiny_clip().save_pretrained(found)
    return found


@pytest.fixture
def models(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with local_hub(monkeypatch, tmp_path / "cache") as found:
        yield found


def test_a_pushed_model_is_read_by_its_name(models, folder):
    ran = run("push", folder, "my-clip")
    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[-1].startswith(f"Pushed {folder} to http://127.0.0.1:")
    assert ran.out.endswith("/me/my-clip.\n")
    assert set(models["me/my-clip"]) == {file.name for file in folder.iterdir()}
    models["me/my-clip"]["evil.py"] = b"raise SystemExit"  # is not downloaded
    model, _, tokenizer = from_pretrained("me/my-clip")
    with torch.no_grad():
        found, expected = (each.encode_texts(**tokenizer(["a dog"])) for each in (model, from_pretrained(folder).model))
    assert torch.equal(found, expected)


def test_only_the_files_of_an_export_are_pushed_and_privately(models, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / ".env").write_text("SECRET=1")
    (copy / "notes").mkdir()
    (copy / "notes/config.json").write_text("{}")
    (tmp_path / "elsewhere.json").write_text("{}")
    (copy / "tower.json").symlink_to(tmp_path / "elsewhere.json")
    ran = run("push", copy, "my-clip")
    assert ran.status == 0, ran.err
    assert set(models["me/my-clip"]) == {file.name for file in folder.iterdir()}
    assert f"Left out 3 files in {copy}" in ran.out
    assert Hub.private == {"me/my-clip": True}
    assert run("push", folder, "open", "--public").status == 0
    assert Hub.private["me/open"] is False


def test_a_folder_that_is_no_export_is_refused(models, tmp_path):
    (tmp_path / "home/.ssh").mkdir(parents=True)
    (tmp_path / "home/.ssh/id_rsa").write_text("PRIVATE KEY")
    (tmp_path / "home/config.json").write_text('{"towers": {}}')
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/last.ckpt").write_bytes(b"1")
    (tmp_path / "run/config.yaml").write_text("model: ALBEFModule")
    for name in ("home", "run"):
        sentence = run("push", tmp_path / name, "my-clip").sentence
        assert re.search("a folder that `vlightning export` wrote, got .* without the files of any layout", sentence)
    assert not models


def test_an_existing_name_gets_a_commit_only_when_asked(models, folder):
    models["me/my-clip"] = {"old": b"1"}
    ran = run("push", folder, "me/my-clip")
    assert ran.sentence.startswith(
        "Expected a new name on the hub, got 'me/my-clip', which exists: give another, or add a commit to it with "
        "--existing."
    )
    assert models["me/my-clip"] == {"old": b"1"}
    assert run("push", folder, "me/my-clip", "--existing").status == 0
    assert "model.safetensors" in models["me/my-clip"]


def test_wrong_use_is_one_sentence(models, folder, monkeypatch, tmp_path):
    assert "'nowhere', nothing there: correct the path" in run("push", "nowhere", "my-clip").sentence
    assert "Expected a name of the hub" in run("push", folder, "my clip").sentence
    monkeypatch.setenv("HF_TOKEN", READS_ONLY)
    assert "got one that may not (403)" in run("push", folder, "my-clip").sentence
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert run("push", folder, "my-clip").sentence.startswith(
        "Expected a token of the Hugging Face hub that may write, got none: log in with `hf auth login`, or set "
        "HF_TOKEN."
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    set_hub(monkeypatch, "http://127.0.0.1:9")
    assert "Expected a connection to the Hugging Face hub" in run("push", folder, "my-clip").sentence
    assert not models
    with pytest.raises(UserError, match=r"got 'me/gone'.*the hub cannot be reached"):
        from_pretrained("me/gone")


def test_an_unknown_name_is_refused(models):
    with pytest.raises(UserError, match=r"got 'me/gone'.*there is no such model, or it is private"):
        from_pretrained("me/gone")
