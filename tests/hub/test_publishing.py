"""`vlightning push`, and reading by name, with a local server in place of the hub."""

import pytest
import torch

from support.command_line import run
from support.hub_server import READS_ONLY, TOKEN, local_hub, set_hub
from support.published import tiny_clip
from vlightning.common.errors import UserError
from vlightning.hub import from_pretrained


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
