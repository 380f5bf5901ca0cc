"""`--download` from a local server that answers as the Hugging Face hub does."""

import io
import json
import zipfile

import pytest

from support.command_line import run
from support.evaluation_sets import CUES, NAMES, OBJECTS, colour_model, picture, write_task
from support.hub_server import local_hub, set_hub
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


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    monkeypatch.setattr("vlightning.evaluate.work.load_model", lambda model, weights: colour_model(model))


def evaluated(root, *keys):
    words = ("--download", "--num_workers=0", "--accelerator=cpu", "--out", root / "r.jsonl")
    return run("evaluate", "--model", "colours", "--root", root, "--tasks", ",".join(keys), *words)


def test_missing_sets_are_downloaded_and_those_that_cannot_be_are_named(monkeypatch, tmp_path):
    root, published = tmp_path / "sets", repositories(tmp_path / "hub")
    with local_hub(monkeypatch, tmp_path / "cache", published, [TASKS[GATED].hub_name]):
        ran = evaluated(root, PETS, FLICKR, WINO, GATED, UNKNOWN)
    assert ran.status == 0, ran.err
    results = {result.key: result for result in read_results(root / "r.jsonl")}
    assert results[PETS].main == pytest.approx(7 / 9)
    assert results[FLICKR].main == 1.0
    assert results[WINO].main == pytest.approx((1 + 1 / 3) / 2)
    assert "data set djghosh/wds_cifar10_test of cifar10 on the hub, got none (it is gated: accept its terms" in ran.out
    assert "djghosh/wds_stl10_test of stl10 on the hub, got none (there is no such data set, or it is priv" in ran.out
    (absent,) = [line for line in ran.out.splitlines() if line.startswith("Not in the folder of the sets: ")]
    assert "cifar10" in absent

    with local_hub(monkeypatch, tmp_path / "empty"):  # nothing is downloaded twice
        again = evaluated(root, PETS, FLICKR, WINO)
    assert "Download" not in again.out


def test_without_a_network_the_command_ends_with_one_sentence(monkeypatch, tmp_path):
    set_hub(monkeypatch, "http://127.0.0.1:9")
    ran = evaluated(tmp_path / "sets", PETS, FLICKR)
    hub_is_reachable.cache_clear()
    assert ran.status == 1
    assert "Expected the Hugging Face hub for the 2 sets that" in ran.sentence
