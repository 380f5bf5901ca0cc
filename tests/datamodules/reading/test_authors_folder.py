"""Folders as the authors of Oxford-IIIT Pet and Food-101 publish them."""

from pathlib import Path

import pytest

from support.data.images import draw_image, write_food101, write_pets
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageClassificationDataModule

SMALL = {"batch_size": 2, "num_workers": 0, "seed": 0, "image_size": 8}


def opened(folder, **options):
    sources = {"train": str(folder), "validation": {"path": str(folder), "split": "test"}, "test": str(folder)}
    cache = str(folder.parent / "cache")
    data = ImageClassificationDataModule(**sources | SMALL | {"cache_dir": cache} | options)
    data.setup("fit")
    data.setup("test")
    return data


def labels(data, split):
    rows = data._rows[split]
    return {Path(rows.image_name(row)).stem: rows.label(row) for row in range(len(rows))}


def test_pets_have_the_authors_splits_numbers_and_breeds(tmp_path):
    folder = write_pets(tmp_path / "oxford-iiit-pet", ["Abyssinian", "american_bulldog", "Bengal"], trainval=2, test=1)
    (folder / "annotations/trimaps").mkdir()
    draw_image(0).save(folder / "annotations/trimaps/Bengal_1.png")  # in no list
    data = opened(folder)
    assert data.num_classes == 3
    assert data.class_names == ("Abyssinian", "American Bulldog", "Bengal")
    assert labels(data, "train") == {
        "Abyssinian_1": 0,
        "Abyssinian_2": 0,
        "american_bulldog_1": 1,
        "american_bulldog_2": 1,
        "Bengal_1": 2,
        "Bengal_2": 2,
    }
    expected = {"Abyssinian_3": 0, "american_bulldog_3": 1, "Bengal_3": 2}
    assert labels(data, "validation") == labels(data, "test") == expected
    (batch, *_) = data.test_dataloader()
    assert batch["image"].shape == (2, 3, 8, 8)


def test_food_has_the_authors_splits_and_the_order_of_their_classes(tmp_path):
    folder = write_food101(tmp_path / "food-101", ["waffles", "apple_pie"], train=2, test=1)
    data = opened(folder, num_classes=2)
    assert data.class_names == ("waffles", "apple_pie")
    assert sorted(labels(data, "train").values()) == [0, 0, 1, 1]
    assert labels(data, "test") == {"12": 0, "22": 1}


def test_validation_needs_a_named_split_since_the_authors_have_none(tmp_path):
    folder = write_pets(tmp_path / "pets", ["Abyssinian"], trainval=1, test=1)
    with pytest.raises(UserError, match=r"Expected the split 'validation' in .*, got trainval, test: name one of them"):
        opened(folder, validation=str(folder))


def test_a_list_that_lacks_a_class_is_refused_and_an_invalid_line_is_a_bad_row(tmp_path):
    folder = write_pets(tmp_path / "pets", ["Abyssinian", "Bengal"], trainval=3, test=1)
    path = folder / "annotations/trainval.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["# comment", lines[0], "Abyssinian", *lines[1:]]))
    data = opened(folder)
    assert len(data._rows["train"]) == 7
    rows = data._rows["train"]
    labels = [rows.raw_label(row) for row in range(len(rows))]
    assert labels == ["Abyssinian", None, *["Abyssinian"] * 2, *["Bengal"] * 3]
    for name in ("trainval", "test"):
        path = folder / f"annotations/{name}.txt"
        path.write_text("\n".join(line for line in path.read_text().splitlines() if line.split()[1:2] == ["2"]))
    with pytest.raises(UserError, match=r"Expected the classes 1 to 2 in the lists of .*, got 1 of them"):
        opened(folder)
