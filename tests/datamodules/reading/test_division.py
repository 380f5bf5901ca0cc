"""`data.split`: splits out of one source, which share no image, id or text."""

import json
import random
import shutil
from collections import Counter

import pytest

from support.data.images import draw_image, encoded
from support.data.pair_files import opened
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.datamodules import EmbeddedCaptionsDataModule, ImageClassificationDataModule, ImageTextDataModule
from vlightning.datamodules.reading.division import shares_of
from vlightning.datamodules.reading.table import positions_of

SPLITS = ("train", "validation", "test")


def pairs(folder, count=60, order=None):
    """A JSON list in which images repeat as bytes, under ids and under texts, and the chains of such rows."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(count):
        name = f"{number}.png"
        same = number - 1 if number % 10 == 1 else number  # 1 has the bytes of 0, 11 those of 10
        draw_image(same).save(folder / name)
        text = f"text {number - 2}" if number % 10 == 3 else f"text {number}"  # 3 has the text of 1
        rows.append({"image": name, "caption": text, "image_id": number - 1 if number % 10 == 4 else number})
    for number in range(4, count, 10):  # 4 has the id of 3, so that 0, 1, 3 and 4 are a chain
        assert rows[number]["image_id"] == rows[number - 1]["image_id"]
    random.Random(order).shuffle(rows)
    (folder / "pairs.json").write_text(json.dumps(rows))
    return folder / "pairs.json"


def sides(data):
    """The split of each text; a row is in one split only."""
    found = {}
    for split in SPLITS:
        if (table := data.open_split(split)) is None:
            continue
        for row in range(len(table)):
            key = (table.image_name(row).rpartition("/")[2], table.captions(row)[0])
            assert key not in found
            found[key] = split
    return found


def module(**options):
    return ImageTextDataModule(image_size=16, batch_size=4, num_workers=0, **options)


def test_chains_of_equal_images_ids_and_texts_are_in_one_split(tmp_path):
    file = pairs(tmp_path / "pairs")
    found = sides(module(train=str(file), split="0.6/0.2/0.2"))
    assert len(found) == 60
    number = {name: split for (name, _), split in found.items()}
    for start in range(0, 60, 10):
        assert len({number[f"{start + place}.png"] for place in (0, 1, 3, 4)}) == 1
    counts = Counter(found.values())
    assert counts["train"] == pytest.approx(36, abs=4)
    assert counts["validation"] == pytest.approx(12, abs=4)


def test_the_division_is_that_of_the_rows_and_of_the_seed(tmp_path):
    file = pairs(tmp_path / "pairs")
    first = sides(module(train=str(file), split="0.6/0.2/0.2"))
    assert sides(module(train=str(file), split="0.6/0.2/0.2", seed=5)) == first  # the run's seed has no part
    assert sides(module(train=str(pairs(tmp_path / "pairs", order=7)), split="0.6/0.2/0.2")) == first
    shutil.move(tmp_path / "pairs", tmp_path / "moved")
    assert sides(module(train=str(tmp_path / "moved/pairs.json"), split="0.6/0.2/0.2")) == first
    assert sides(module(train=str(tmp_path / "moved/pairs.json"), split="0.6/0.2/0.2", split_seed=1)) != first


def test_without_repeats_the_shares_are_exact_and_two_splits_suffice(files, tmp_path):
    source = files.parquet(100)
    counts = Counter(sides(module(train=source, split="0.9/0.05/0.05")).values())
    assert counts == {"train": 90, "validation": 5, "test": 5}
    data = opened(module, train=source, split="0.9/0.1")
    assert len(data.opened_rows("train")) == 90
    assert len(data.opened_rows("validation")) == 10
    assert data.open_split("test") is None
    assert len(list(data.val_dataloader())) == 3
    few = Counter(sides(module(train=files.parquet(3, "few.parquet"), split="0.9/0.05/0.05")).values())
    assert few == {"train": 1, "validation": 1, "test": 1}


def test_images_that_the_data_contains_are_compared_by_their_bytes(files):
    contents = [{"bytes": encoded(draw_image(number // 2), "PNG"), "path": None} for number in range(40)]
    source = files.parquet(40, image=contents)
    found = sides_of_rows(module(train=source, split="0.5/0.5"))
    assert all(found[2 * number] == found[2 * number + 1] for number in range(20))
    assert Counter(found.values()) == {"train": 20, "validation": 20}


def sides_of_rows(data):
    """The split of each text `image number N`."""
    return {
        int(table.captions(row)[0].split()[-1]): split
        for split in SPLITS
        if (table := data.open_split(split)) is not None
        for row in range(len(table))
    }


@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "by path"])
def test_what_is_read_by_columns_is_that_of_the_rows_of_the_split(ids, tmp_path):
    sources = [pairs(tmp_path / "one"), pairs(tmp_path / "two", order=3)]
    for file in () if ids else sources:
        rows = json.loads(file.read_text())
        file.write_text(json.dumps([{"image": row["image"], "caption": row["caption"]} for row in rows + rows[:9]]))
    data = module(train=list(map(str, sources)), split="0.6/0.4")
    for split in ("train", "validation"):
        table = data.open_split(split)
        captions = [table.captions(row) for row in range(len(table))]
        assert list(table.texts()) == [text for texts in captions for text in texts]
        assert table.caption_counts().tolist() == [len(texts) for texts in captions]
        keys = [table.image_id(row) for row in range(len(table))]
        groups = [[row for row in range(len(table)) if keys[row] == key] for key in dict.fromkeys(keys)]
        assert table.images() == positions_of(table._image_keys()) == groups  # and not row by row
        assert any(len(group) > 1 for group in groups)


def test_several_sources_are_divided_together(files):
    first, second = files.parquet(20, "a.parquet"), files.parquet(20, "b.parquet")
    found = {}
    data = module(train=[first, second], split="0.5/0.5")
    for split in ("train", "validation"):
        table = data.open_split(split)
        for row in range(len(table)):
            found.setdefault(table.captions(row)[0], []).append(split)
    assert all(len(splits) == 2 and len(set(splits)) == 1 for splits in found.values())  # equal images of both files


def test_each_label_is_in_training_and_in_proportion_elsewhere(tmp_path):
    for number in range(80):
        label = "rare" if number == 0 else ("cat", "dog")[number % 4 == 0]
        (tmp_path / "images" / label).mkdir(parents=True, exist_ok=True)
        draw_image(number).save(tmp_path / "images" / label / f"{number}.png")
    draw_image(2).save(tmp_path / "images/cat/again.png")
    data = opened(
        ImageClassificationDataModule,
        train=str(tmp_path / "images"),
        split="0.8/0.2",
        num_workers=0,
        batch_size=4,
    )
    assert data.class_names == ("cat", "dog", "rare")
    tables = {split: data.opened_rows(split) for split in ("train", "validation")}
    counts = {split: Counter(map(table.raw_label, range(len(table)))) for split, table in tables.items()}
    assert counts["train"]["rare"] == 1
    assert counts["validation"]["dog"] == pytest.approx(4, abs=1)
    assert counts["validation"]["cat"] == pytest.approx(12, abs=1)
    names = [
        [data.image_name(split, row).rpartition("/")[2] for row in range(len(data.opened_rows(split)))]
        for split in ("train", "validation")
    ]
    assert sum(name in ("2.png", "again.png") for name in names[0]) in (0, 2)


def test_the_embeddings_of_captions_are_divided(files, tmp_path):
    data = EmbeddedCaptionsDataModule("none.parquet", train=files.parquet(20), split="0.75/0.25")
    assert [len(data.open_sources(split)[0][1].rows) for split in ("train", "validation")] == [15, 5]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"split": "0.9/0.2"}, "Expected shares in data.split that add up to 1, got '0.9/0.2' (1.1): correct it."),
        ({"split": "90%"}, "Expected shares of training, validation and test as data.split, such as 0.9/0.05/0.05"),
        ({"split": "0/0.5/0.5"}, "Expected shares of training, validation and test as data.split"),
        ({"split": "0.9/-0.1/0.2"}, "Expected shares of training, validation and test as data.split"),
        ({"split": "0.9/0.1", "validation": "other.json"}, "Expected data.train alone with data.split, got data.valid"),
        ({"split": "0.9/0.1", "train": None}, "Expected data.train with data.split, got none"),
        ({"split": "0.9/0.1", "streaming": True, "samples_per_epoch": 9}, "Expected no data.split with data.streaming"),
    ],
)
def test_a_mistake_is_one_sentence(files, options, sentence):
    with pytest.raises(UserError) as raised:
        module(**{"train": files.parquet(4), **options})
    assert str(raised.value).startswith(sentence)


def test_rows_that_are_all_connected_are_refused(files):
    data = module(train=files.parquet(4, captions=["the same"] * 4), split="0.5/0.5")
    with pytest.raises(UserError, match="Expected 2 or more groups of rows without a common image, id or text"):
        data.open_split("train")


def test_shares_of_zero_are_left_out():
    assert shares_of("0.8/0/0.2") == {"train": 0.8, "test": 0.2}
    assert [list(shares_of(text)) for text in ("1/0", "0.5/0.5")] == [["train"], ["train", "validation"]]


@pytest.mark.parametrize("kind", ["fit", "data"])
def test_the_command_line_takes_one_file(files, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    source = files.parquet(40)
    words = ["--model=TinyModel", "--data=ImageTextDataModule", f"--data.train={source}", "--data.split=0.8/0.1/0.1"]
    if kind == "data":
        (tmp_path / "model.yaml").write_text("model: {class_path: CLIPModule, init_args: {model: MobileCLIP-tiny}}\n")
        ran = run("data", "--config=model.yaml", *words[1:], "--data.num_workers=0", "--data.image_size=64")
        assert ran.status == 0, ran.err
        assert all(any(str(count) in line for line in ran.out.splitlines()) for count in (32, 4))
        return
    ran = run("fit", *words, "--print_config")
    assert ran.status == 0, ran.err
    assert "split: 0.8/0.1/0.1" in ran.out
