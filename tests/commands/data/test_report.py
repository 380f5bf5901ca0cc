"""`vlightning data` counts what was put into the data, and draws what the model receives."""

import json

import numpy as np
import pytest
from PIL import Image

from support.data.images import draw_image, encoded
from support.runs.command_line import run
from vlightning.commands.data.command import opened, report, run_data
from vlightning.commands.data.sheet import samples_of
from vlightning.common.errors import UserError
from vlightning.datamodules import (
    CLIPEvalTransform,
    ImageTextDataModule,
    ReinforcedShapesDataModule,
    ShapesNLVR2DataModule,
    ShapesVQADataModule,
)

LONG = " ".join(["word"] * 30)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    monkeypatch.chdir(tmp_path)


def images(folder, count):
    """Files of 40 x 20 pixels; 8 is a copy of 0, 9 is cut off, and 10 is smaller than the model's images."""
    for number in range(count):
        content = encoded(draw_image(number, (8, 8) if number == 10 else (40, 20)))
        content = encoded(draw_image(0, (40, 20))) if number == 8 else content[:-40] if number == 9 else content
        (folder / f"{number}.png").write_bytes(content)


def rows():
    texts = [["one", "two"], ["one"], ["  "], [LONG], *([f"text {number}"] for number in range(4, 11)), ["gone"]]
    return [{"image": f"{number}.png", "caption": each} for number, each in enumerate(texts)]


def pairs(tmp_path, **options):
    images(tmp_path, 11)
    (tmp_path / "train.json").write_text(json.dumps(rows()))
    other = [{"image": f"{number}.png", "caption": "other"} for number in (20, 21)]
    (tmp_path / "20.png").write_bytes((tmp_path / "1.png").read_bytes())
    (tmp_path / "21.png").write_bytes(encoded(draw_image(77)))
    (tmp_path / "validation.json").write_text(json.dumps(other))
    settings = {"batch_size": 100, "num_workers": 0, "image_size": 16, "max_tokens": 12, "vocab_size": 300}
    settings |= {"train_transform": CLIPEvalTransform(16, MEAN, STD), "cache_dir": str(tmp_path / "cache")}
    sources = {"train": str(tmp_path / "train.json"), "validation": str(tmp_path / "validation.json")}
    return opened(ImageTextDataModule(**{**settings, **sources, **options}), None)


EXPECTED = {
    "texts": 13,
    "duplicate_images": 1,
    "duplicate_texts": 1,
    "most_frequent_texts": [["one", 2]],
    "empty_texts": 1,
    "over_long_texts": 1,
    "smaller_than_input": 1,
    "unreadable": {"truncated": 1, "missing file": 1},
}


@pytest.mark.parametrize("streaming", [False, True])
def test_everything_is_counted(tmp_path, streaming):
    data = pairs(tmp_path, streaming=streaming, samples_per_epoch=12 if streaming else None)
    said = report(data, tmp_path / "out")
    found = json.loads((tmp_path / "out/report.json").read_text())
    train = found["train"]
    assert {name: train[name] for name in EXPECTED} == EXPECTED
    assert (train["images_read"], train["images"]) == (12, None if streaming else 12)
    assert train["aspect_ratio"] == [1.0, *[2.0] * 6] or train["aspect_ratio"][3:] == [2.0] * 4
    assert (train["width"][0], train["width"][-1], train["height"][-1]) == (8, 40, 20)
    assert train["tokens"][-1] >= 30 + 2
    (pair,) = train["examples_of_duplicate_images"]
    if not streaming:
        assert [name.rpartition("/")[2] for name in pair] == ["0.png", "8.png"]
    assert found["validation"]["also_in_train"] == 1
    for line in ("duplicate images", "1  8.3%", "texts over 12 tokens", "truncated: 1", "width / height"):
        assert line in said
    assert ("first rows of a stream" in said) == streaming
    assert Image.open(tmp_path / "out/samples.png").width > 8 * 100


def test_the_sheet_shows_the_pixels_and_the_cut_texts_of_the_training(tmp_path):
    data = pairs(tmp_path)
    samples = samples_of(data)
    assert len(samples) == 12
    edited = {CLIPEvalTransform(16).edit(draw_image(number, (40, 20))).tobytes(): number for number in range(8)}
    texts = [row["caption"] for row in rows()]
    known = [(edited[image.tobytes()], text) for image, text in samples if image.tobytes() in edited]
    assert dict(known)[3] == " ".join(["word"] * 10)
    assert all(text in texts[number] for number, text in known if number not in (0, 3))
    assert len(known) >= 6


def test_a_limit_reads_some_images_and_says_so(tmp_path):
    said = report(pairs(tmp_path), tmp_path / "out", limit=3)
    found = json.loads((tmp_path / "out/report.json").read_text())["train"]
    assert (found["images_read"], found["images"], found["rows"]) == (3, 12, 12)
    assert "train: 3 images (of 12)" in said


def test_the_rows_that_an_epoch_takes_of_each_source_are_named(tmp_path):
    one, two = (str(tmp_path / f"{name}.json") for name in ("train", "validation"))
    said = report(pairs(tmp_path, train=[one, two], mixing_temperature=float("inf")), tmp_path / "out")
    sources = json.loads((tmp_path / "out/report.json").read_text())["train"]["sources"]
    assert [(source["rows"], source["epoch"]) for source in sources] == [(12, 7), (2, 7)]
    assert "7 in an epoch" in said


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (lambda: ShapesVQADataModule(length=6, eval_length=4, image_size=32, vocab_size=320), 32),
        (lambda: ShapesNLVR2DataModule(length=6, eval_length=4, image_size=32, vocab_size=320), 2 * 32 + 4),
        (lambda: ReinforcedShapesDataModule("made", length=6, eval_length=4, augmentations=1, image_size=32), 32),
    ],
)
def test_tasks_and_reinforced_pairs_are_read_too(tmp_path, make, width):
    data = opened(make(), None)
    report(data, tmp_path / "out")
    found = json.loads((tmp_path / "out/report.json").read_text())
    assert found["train"]["images_read"] == 6
    assert found["train"]["texts"] >= 6
    assert not found["train"]["unreadable"]
    assert {image.width for image, _ in samples_of(data)} == {width}
    assert all(text for _, text in samples_of(data))


def test_the_command_takes_the_options_of_a_fit():
    words = ("--config", "configs/albef/quickstart.yaml", "--data.length", "40", "--limit", "8", "--out", "found")
    ran = run("data", *words)
    assert ran.status == 0, ran.err
    assert "train: 8 images (of 40) with 8 texts" in ran.out
    assert np.asarray(Image.open("found/samples.png")).std() > 10
    words = ("--config", "configs/cocord/quickstart.yaml")
    assert "a datamodule of images with texts, such as ImageTextDataModule, got Shape" in run("data", *words).sentence


def test_no_images_are_no_limit():
    with pytest.raises(UserError, match="at least one image after --limit, got 0"):
        run_data(["--limit", "0"])
