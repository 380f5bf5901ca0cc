"""`--download` from a local server that answers as the Hugging Face hub does."""

import io
import json
import zipfile

import pytest

from support.data.evaluation_sets import CUES, NAMES, OBJECTS, color_model, picture, write_task
from support.data.hub_server import local_hub, set_hub
from support.runs.command_line import run
from vlightning.commands.evaluate.hub import unpack_table
from vlightning.commands.evaluate.results import read_results
from vlightning.commands.evaluate.tasks import TASKS
from vlightning.common.errors import UserError
from vlightning.common.hub import hub_is_reachable

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
def colors(monkeypatch):
    monkeypatch.setattr("vlightning.commands.evaluate.command.load_model", lambda model, weights: color_model(model))


def evaluated(root, *keys):
    words = ("--download", "--num_workers=0", "--accelerator=cpu", "--out", root / "r.jsonl")
    return run("evaluate", "--model", "colors", "--root", root, "--tasks", ",".join(keys), *words)


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


def packed_as(monkeypatch, tmp_path, archive):
    """Download Flickr's set with another archive of its images; return the sentence, and the folder of the sets."""
    hub_name, root = TASKS[FLICKR].hub_name, tmp_path / "sets"
    published = {hub_name: repositories(tmp_path / "hub")[hub_name] | {"images.zip": archive}}
    with local_hub(monkeypatch, tmp_path / "cache", published):
        ran = evaluated(root, FLICKR)
    assert ran.status == 1
    assert not (root / TASKS[FLICKR].folder).exists()
    return ran.sentence, root


def test_an_archive_that_unpacks_to_far_more_than_images_is_refused_before_it_fills_the_disk(monkeypatch, tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.png", "w") as member:
        for _ in range(32):
            member.write(bytes(2**20))
    sentence, root = packed_as(monkeypatch, tmp_path, content.getvalue())
    assert "bytes of images in" in sentence
    assert "got 33,554,432: the archive is no set of images" in sentence
    assert sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) < 2**20


def test_different_images_of_one_name_in_an_archive_are_refused(monkeypatch, tmp_path):
    images = {f"images/{name}.png": picture(name) for name in NAMES[:5]}
    other = {f"more/{NAMES[0]}.png": picture(NAMES[1])}
    sentence, _ = packed_as(monkeypatch, tmp_path, zipped(images | other))
    assert f"different ones of the name '{NAMES[0]}.png'" in sentence


def test_a_damaged_archive_is_one_sentence(monkeypatch, tmp_path):
    whole = zipped({"a.png": picture(NAMES[0])})
    sentence, _ = packed_as(monkeypatch, tmp_path, whole[: len(whole) // 2])
    assert "which cannot be unpacked (File is not a zip file)" in sentence


def test_without_a_network_the_command_ends_with_one_sentence(monkeypatch, tmp_path):
    set_hub(monkeypatch, "http://127.0.0.1:9")
    ran = evaluated(tmp_path / "sets", PETS, FLICKR)
    hub_is_reachable.cache_clear()
    assert ran.status == 1
    assert "Expected the Hugging Face hub for the 2 sets that" in ran.sentence


@pytest.mark.parametrize("cell", ['"a 5 inch screen', "no list", ""])
def test_a_table_of_the_hub_with_a_row_that_cannot_be_read_is_refused(tmp_path, cell):
    rows = [f'{name}.png,"[""a {name} square""]"' for name in NAMES[:5]]
    rows[1] = f"{NAMES[1]}.png,{cell}"
    (tmp_path / "table.csv").write_text("\n".join(["filename,raw", *rows]))
    (tmp_path / "images.zip").write_bytes(zipped({f"{NAMES[0]}.png": picture(NAMES[0])}))
    with pytest.raises(UserError, match=r"^Expected row 2 of '.*table.csv' to be whole, got one that cannot be read"):
        unpack_table(tmp_path)
    assert not (tmp_path / "images").exists()
