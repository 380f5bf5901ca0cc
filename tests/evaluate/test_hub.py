"""`--download` from a local server that answers as the Hugging Face hub does."""

import hashlib
import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from support.command_line import run
from support.evaluation_sets import CUES, NAMES, OBJECTS, colour_model, picture, write_task
from vlightning.datamodules.sources.hub import hub_is_reachable
from vlightning.evaluate.results import read_results
from vlightning.evaluate.tasks import TASKS

PETS, FLICKR, WINO, GATED, UNKNOWN = (
    "vtab/pets",
    "retrieval/flickr_1k_test_image_text_retrieval",
    "misc/winogavil",
    "cifar10",
    "stl10",
)
COMMIT = "0" * 39 + "1"


class Hub(BaseHTTPRequestHandler):
    """Lists and sends the files of `repositories`, by name."""

    repositories = {}  # noqa: RUF012

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer()

    def answer(self, body=True):
        kind, _, rest = self.path.removeprefix("/api").lstrip("/").partition("/")
        name, _, rest = rest.partition("/resolve/" if "/resolve/" in rest else "/tree/" if "/tree/" in rest else "/rev")
        if self.path == "/":
            return self.send(200, b"", body)
        if name == TASKS[GATED].hub_name:
            return self.send(403, b"{}", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if kind != "datasets" or name not in self.repositories:
            return self.send(401, b"{}", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"})
        files = self.repositories[name]
        if "/resolve/" in self.path:
            content = files[rest.partition("/")[2]]
            return self.send(200, content, body, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        listed = tree if "/tree/" in self.path else {"id": name, "sha": COMMIT, "siblings": []}
        return self.send(200, json.dumps(listed).encode(), body)

    def send(self, status, content, body, headers=()):
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": len(content), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *words):
        pass


def zipped(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def repositories(folder):
    """The files on the hub: tars of one set; a CSV and a zip file of two others, as their authors publish them."""
    write_task(folder, TASKS[PETS])
    pets = folder / TASKS[PETS].folder
    files = {str(file.relative_to(pets)): file.read_bytes() for file in pets.rglob("*") if file.is_file()}
    rows = [f'''{name}.png,"['a {name} square', ""it is {name}""]"''' for name in NAMES[:5]]
    flickr = {
        "test_1k_flickr.csv": "\n".join(["filename,raw", *rows]).encode(),
        "images.zip": zipped({f"images/{name}.png": picture(name) for name in NAMES[:5]}),
        "script.py": b"",
    }
    cells = [json.dumps(cue[name]).replace('"', '""') for cue in CUES for name in ("candidates", "associations")]
    lines = [f'{cue["cue"]},"{cells[2 * row]}","{cells[2 * row + 1]}"' for row, cue in enumerate(CUES)]
    images = {f"w/{name}.jpg": picture(name.partition("-")[0], 1, "JPEG") for name in OBJECTS}
    wino = {"winogavil.csv": "\n".join(["cue,candidates,associations", *lines]).encode(), "images.zip": zipped(images)}
    return {TASKS[PETS].hub_name: files, TASKS[FLICKR].hub_name: flickr, TASKS[WINO].hub_name: wino}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The address of the hub; nothing is kept of whether another one was reached."""
    Hub.repositories = repositories(tmp_path / "hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    set_address(monkeypatch, address)
    yield
    server.shutdown()
    server.server_close()
    hub_is_reachable.cache_clear()


def set_address(monkeypatch, address):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("vlightning.evaluate.work.load_model", lambda model, weights: colour_model(model))
    hub_is_reachable.cache_clear()


def evaluated(root, *keys):
    words = ("--download", "--num_workers=0", "--accelerator=cpu", "--out", root / "r.jsonl")
    return run("evaluate", "--model", "colours", "--root", root, "--tasks", ",".join(keys), *words)


def test_missing_sets_are_downloaded_and_those_that_cannot_be_are_named(hub, tmp_path):
    root = tmp_path / "sets"
    ran = evaluated(root, PETS, FLICKR, WINO, GATED, UNKNOWN)
    assert ran.status == 0, ran.err
    results = {result.key: result for result in read_results(root / "r.jsonl")}
    assert results[PETS].main == pytest.approx(7 / 9)
    assert results[FLICKR].main == 1.0
    assert results[WINO].main == pytest.approx((1 + 1 / 3) / 2)
    assert "data set djghosh/wds_cifar10_test of cifar10 on the hub, got none (it is gated: accept its terms" in ran.out
    assert "djghosh/wds_stl10_test of stl10 on the hub, got none (there is no such data set, or it is priv" in ran.out
    assert "Missing: cifar10 (no set in" in ran.out

    Hub.repositories = {}  # nothing is downloaded twice
    again = evaluated(root, PETS, FLICKR, WINO)
    assert "Download" not in again.out


def test_without_a_network_the_command_ends_with_one_sentence(monkeypatch, tmp_path):
    set_address(monkeypatch, "http://127.0.0.1:9")
    ran = evaluated(tmp_path / "sets", PETS, FLICKR)
    hub_is_reachable.cache_clear()
    assert ran.status == 1
    assert "Expected the Hugging Face hub for the 2 sets that" in ran.sentence
