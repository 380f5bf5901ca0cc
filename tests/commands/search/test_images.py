"""`vlightning search MODEL images/ "a text"`: a folder or a table, by an export, a run or a published model."""

import csv
import json
import re
import shutil

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from support.data.colors import read_table, write_colors
from support.project.demo import TEXT, write_images, write_model
from support.runs.command_line import run
from vlightning.commands.evaluate.model import load_model

HIT = re.compile(r"  (-?\d\.\d{4})  (?: *(\d+\.\d)%  )?(\S+)(?:  (.*))?")


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """A published model of random weights, and images with a table beside their folder."""
    return write_colors(tmp_path_factory.mktemp("colors"))


@pytest.fixture(scope="module")
def albef(tmp_path_factory):
    """An ALBEF's export and checkpoint, and images with a table in their folder."""
    folder = tmp_path_factory.mktemp("albef")
    write_images(folder / "images")
    write_model(folder)
    return folder


def hits(ran):
    assert ran.status == 0, ran.err
    found = [HIT.fullmatch(line) for line in ran.out.splitlines() if line.startswith("  ")]
    assert all(found), ran.out
    return [(float(hit[1]), None if hit[2] is None else float(hit[2]), hit[3], hit[4]) for hit in found]


def cosines(model, text, files):
    """Cosines of a text with images by the model itself, without the code of the search."""
    query = model.encode_texts([text])[0]
    with torch.no_grad():
        pixels = [model.transform(Image.open(file).convert("RGB"))[None] for file in files]
        return torch.stack([model.encode_images(each)[0] @ query for each in pixels])


def test_a_text_ranks_the_images_of_a_folder_by_a_published_model_with_its_temperature(colors, tmp_path):
    model = load_model(f"{colors}/model")
    files = sorted((colors / "images").iterdir())
    expected = cosines(model, "dark dark full", files)
    shares = 100 * (model.logit_scale * expected).softmax(0)
    assert model.logit_scale > 10
    words = (
        "search",
        f"{colors}/model",
        f"{colors}/images",
        "dark dark full",
        f"--cache={tmp_path}",
        "--num_workers=0",
    )
    ran = run(*words, "--count=7", "--device=cpu", f"--captions={colors}/pairs.csv")
    assert "Embedding 40 of 40 images." in ran.out
    found = hits(ran)
    order = expected.argsort(descending=True)[:7].tolist()
    assert [score for score, *_ in found] == pytest.approx(expected[order].tolist(), abs=1e-4)
    assert [share for _, share, *_ in found] == pytest.approx(shares[order].tolist(), abs=0.06)
    titles = {name.removeprefix("images/"): caption for name, caption in read_table(colors / "pairs.csv")}
    assert all(title == titles.get(name) for *_, name, title in found)
    again = run(*words, "--count=7", f"--captions={colors}/pairs.csv")
    assert "Embedding" not in again.out
    assert hits(again) == found
    renamed = tmp_path / "renamed.csv"
    renamed.write_text(
        (colors / "pairs.csv").read_text().replace("image,", "path,", 1).replace("images/", f"{colors}/images/")
    )
    assert hits(run(*words, "--count=7", f"--captions={renamed}", "--image_column=path")) == found
    untitled = run(*words, "--count=7", f"--captions={renamed}")
    assert not any(title for *_, title in hits(untitled))
    assert f"No titles: {renamed} names no image of {colors}/images under 'image'" in untitled.err


def test_a_run_and_an_export_rank_as_the_demo_with_the_titles_in_the_folder(albef, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    shutil.copy(albef / "0.ckpt", tmp_path / "run/checkpoints/last.ckpt")
    words = (f"{albef}/images", TEXT, "a ring", "--count=3", f"--cache={tmp_path}/cache", "--num_workers=0")
    exported = hits(run("search", f"{albef}/model0", *words))
    assert hits(run("search", f"{tmp_path}/run", *words)) == exported
    titles = {row["image"]: row["caption"] for row in json.loads((albef / "images/captions.json").read_text())}
    assert [title for *_, title in exported] == [titles[name] for *_, name, _ in exported]
    assert len(exported) == 6
    files = [albef / "images" / name for name in titles]
    best = cosines(load_model(f"{albef}/model0"), TEXT, files).sort(descending=True).values[:3]
    assert [score for score, *_ in exported[:3]] == pytest.approx(best.tolist(), abs=1e-4)


def test_a_table_of_paths_and_one_with_images_rank_as_their_folder(colors, tmp_path):
    rows = [(colors / name, caption) for name, caption in read_table(colors / "pairs.csv")]
    content = {"photo": [file.read_bytes() for file, _ in rows], "title": [caption for _, caption in rows]}
    parquet.write_table(pa.table(content), tmp_path / "pairs.parquet")
    with (colors / "titles.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("photo", "title"), *((path.relative_to(colors), text) for path, text in rows)])
    columns = ("--image_column=photo", "--caption_column=title", f"--cache={tmp_path}/cache", "--num_workers=0")
    by_path = hits(run("search", f"{colors}/model", f"{colors}/titles.csv", "half half dark", *columns))
    ran = run("search", f"{colors}/model", f"{tmp_path}/pairs.parquet", "half half dark", *columns)
    lines = [line for line in ran.out.splitlines() if line.startswith("  ")]
    captions = dict(read_table(colors / "pairs.csv"))
    assert [title for *_, title in by_path] == [
        captions[f"images/{name.rpartition('/')[2]}"] for *_, name, _ in by_path
    ]
    assert [line.split()[:2] for line in lines] == [[f"{score:.4f}", f"{share}%"] for score, share, *_ in by_path]
    assert all(line.endswith(title) for line, (*_, title) in zip(lines, by_path, strict=True))
    assert f"{tmp_path}/pairs.parquet, row" in lines[0]


def test_an_image_ranks_images_and_captions(colors, tmp_path):
    words = (f"{colors}/model", f"{colors}/images", f"{colors}/images/9.png", "--by=image", f"--cache={tmp_path}")
    assert hits(run("search", *words, "--count=1", "--num_workers=0"))[0][::2] == (pytest.approx(1, abs=1e-4), "9.png")
    ran = run("search", *words, "--of=text", f"--captions={colors}/pairs.csv", "--num_workers=0", "--count=2")
    captions = {caption for _, caption in read_table(colors / "pairs.csv")}
    shown = [line.split("%  ")[1] for line in ran.out.splitlines() if line.startswith("  ")]
    assert len(shown) == 2
    assert set(shown) <= captions


def test_a_page_holds_the_images_and_shows_titles_as_text(colors, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in (1, 2, 3):
        shutil.copy(colors / f"images/{number}.png", images)
    (images / "titles.jsonl").write_text('{"file_name": "2.png", "caption": ["a <b>bag</b>", "other"]}\nbroken\n')
    words = ("search", f"{colors}/model", images, "<i>bag", f"--html={tmp_path}/page.html", f"--cache={tmp_path}")
    ran = run(*words, "--num_workers=0")
    assert f"Page: {tmp_path}/page.html" in ran.out
    page = (tmp_path / "page.html").read_text()
    assert page.count('src="data:image/jpeg;base64,') == 3
    assert "a &lt;b&gt;bag&lt;/b&gt;" in page
    assert "<h2>&lt;i&gt;bag</h2>" in page
    assert "http" not in page
    for (score, share, name, _), figure in zip(hits(ran), page.split("<figure>")[1:], strict=True):
        assert f"{share}%" in figure
        assert f"cosine {score:.3f}"[:-1] in figure
        assert name in figure


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model", "images"), "Expected a query after the images"),
        (("gone", "images", "a"), "Expected a store, a run, a checkpoint or an export first, got 'gone', which"),
        (("model", "a red bag"), "Expected a query after the images 'a red bag', got none: add a text"),
        (("model", "a red bag", "b"), "Expected a folder of images after the model, got 'a red bag': correct it."),
        (("model", "images", "a", "--count=0"), "Expected at least 1 after --count, got 0"),
        (("model", "images", "gone.png", "--by=image"), "Expected an image, got 'gone.png' (missing file)"),
        (("model", "images", "a", "--of=text"), "Expected captions of 'images' to search with --of text, got none"),
        (("model", "images", "a", "--captions=gone.csv"), "Expected a file of captions after --captions, got"),
        (("model", "images", "a", "--captions=pairs.csv", "--caption_column=title"), "Expected captions under `title`"),
        (("model", "images", "a", "--caption_column=title"), "Expected a table with the column 'title' in"),
        (("model", "pairs.csv", "a", "--image_column=photo"), "set --image_column to "),
        (("model", "pairs.csv", "a", "--captions=pairs.csv"), "Expected no --captions with the table 'pairs.csv'"),
        (("model", "images/1.png", "a"), "Expected .json, .jsonl, .csv or .parquet files with images, got"),
    ],
)
def test_a_mistake_is_one_sentence(colors, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(colors)
    ran = run("search", *words, f"--cache={tmp_path}", "--num_workers=0")
    assert ran.sentence.startswith(sentence) or sentence in ran.sentence
