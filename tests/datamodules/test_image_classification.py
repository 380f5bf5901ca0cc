"""Labeled images: sources, classes, views, order, bad samples."""

import json
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from lightning import Trainer
from PIL import Image

from support.data.images import draw_image, encoded
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageClassificationDataModule, ShapeClassesDataModule
from vlightning.datamodules.base.faults import BadDataError
from vlightning.datamodules.drawn.labels import CLASSES, ShapeClassTable
from vlightning.datamodules.transforms.classification import (
    CIFAR100_MEAN,
    CIFAR100_STD,
    CIFARTrainTransform,
    ImageNetEvalTransform,
)

OPTIONS = {"batch_size": 4, "num_workers": 0, "seed": 0, "image_size": 8}


def parquet(folder, labels, name="train.parquet", label_column="label", feature=None, broken=()):
    """A Parquet file with an image for each label."""
    data = [b"no image" if row in broken else encoded(draw_image(row)) for row in range(len(labels))]
    rows = {"image": [{"bytes": item, "path": None} for item in data], label_column: labels}
    features = datasets.Dataset.from_dict(rows).features.copy()
    features["image"] = datasets.Image()
    if feature is not None:
        features[label_column] = feature
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / name)
    return str(folder / name)


def module(tmp_path, train, **options):
    return ImageClassificationDataModule(train=train, cache_dir=str(tmp_path / "cache"), **OPTIONS | options)


def labels_by_row(data, split="train"):
    return [data._rows[split].label(row) for row in range(len(data._rows[split]))]


def test_numbers_are_classes_and_the_largest_says_how_many(tmp_path):
    data = module(tmp_path, parquet(tmp_path, [0, 3, 1, 0, 2, 3]))
    data.setup("fit")
    assert labels_by_row(data) == [0, 3, 1, 0, 2, 3]
    assert data.num_classes == 4
    assert data.class_names is None


def test_names_that_the_source_lists_number_the_classes(tmp_path):
    feature = datasets.ClassLabel(names=["zebra", "ape", "cat"])
    data = module(tmp_path, parquet(tmp_path, [2, 0, 0, 2], feature=feature))
    data.setup("fit")
    assert labels_by_row(data) == [2, 0, 0, 2]
    assert data.num_classes == 3
    assert data.class_names == ("zebra", "ape", "cat")


def test_names_in_the_data_are_sorted_and_validation_follows_training(tmp_path):
    train = parquet(tmp_path, ["dog", "ape", "cat", "dog"])
    validation = parquet(tmp_path, ["dog", "cat"], "validation.parquet")
    data = module(tmp_path, train, validation=validation)
    data.setup("fit")
    assert labels_by_row(data) == [2, 0, 1, 2]
    assert labels_by_row(data, "validation") == [2, 1]  # not 1, 0
    assert data.class_names == ("ape", "cat", "dog")


@pytest.mark.parametrize("form", ["folders", "csv", "jsonl", "tar"])
def test_other_forms_hold_the_same(tmp_path, files, form):
    names = ["dog", "ape", "dog", "ape"]
    files.images(4)
    if form == "folders":
        for row, name in enumerate(names):
            target = files.folder / "classes" / name / f"{row}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            draw_image(row).save(target)
        source, expected = str(files.folder / "classes"), ["ape", "ape", "dog", "dog"]
    elif form == "tar":
        members = [(f"{row}.png", encoded(draw_image(row), "PNG")) for row in range(4)]
        members += [(f"{row}.cls", name.encode()) for row, name in enumerate(names)]
        source, expected = files.tar(sorted(members)), names
    else:
        lines = [{"image": f"images/{row}.png", "label": name} for row, name in enumerate(names)]
        path = files.folder / f"list.{form}"
        text = [json.dumps(line) for line in lines]
        if form == "csv":
            text = ["image,label", *(f"{line['image']},{line['label']}" for line in lines)]
        path.write_text("\n".join(text))
        source, expected = str(path), names
    data = module(tmp_path, source, label_column="cls" if form == "tar" else "label")
    data.setup("fit")
    assert [data.class_names[label] for label in labels_by_row(data)] == expected
    (batch,) = data.train_dataloader()
    assert sorted(batch["label"].tolist()) == [0, 0, 1, 1]


def test_views_are_independent_and_a_function_of_seed_epoch_and_row(tmp_path):
    views = ["image", "image_slow", "image_teacher"]
    source = parquet(tmp_path, [0, 1] * 8)

    def batches(**options):
        data = module(tmp_path, source, views=views, **options)
        data.setup("fit")
        loader = data.train_dataloader()
        return [list(loader), list(loader)]

    (first, second), (again, _), (workers, _) = batches(), batches(), batches(num_workers=2)
    for mine, same, other in zip(first, again, workers, strict=True):
        assert mine.keys() == {*views, "label", "sample_index"}
        for name in mine:
            assert torch.equal(mine[name], same[name])
            assert torch.equal(mine[name], other[name])
        assert not torch.equal(mine["image"], mine["image_slow"])
        assert not torch.equal(mine["image_slow"], mine["image_teacher"])
    (alone, _) = (list(module_batches) for module_batches in _only_first_view(tmp_path, source))
    assert all(torch.equal(mine["image"], one["image"]) for mine, one in zip(first, alone, strict=True))
    by_row = [
        {int(row): image for batch in epoch for row, image in zip(batch["sample_index"], batch["image"], strict=True)}
        for epoch in (first, second)
    ]
    assert any(not torch.equal(by_row[0][row], by_row[1][row]) for row in by_row[0])


def _only_first_view(tmp_path, source):
    data = module(tmp_path, source, views=["image"])
    data.setup("fit")
    loader = data.train_dataloader()
    return list(loader), list(loader)


def test_views_are_asked_of_the_module(tmp_path):
    class Asking(torch.nn.Module):
        views = ("image", "other")

    data = module(tmp_path, parquet(tmp_path, [0, 1, 0, 1]))
    assert data.views == ["image"]
    data.trainer = type("Trainer", (), {"lightning_module": Asking()})()
    assert data.views == ["image", "other"]


def test_without_views_no_image_is_read(tmp_path):
    data = module(tmp_path, parquet(tmp_path, [0, 1, 2, 3]), views=[])
    data.setup("fit")
    data._rows["train"].image = None  # would not be callable
    (batch,) = data.train_dataloader()
    assert batch.keys() == {"label", "sample_index"}
    assert batch["label"].tolist() == batch["sample_index"].tolist()


def test_unusable_images_are_replaced_in_training_and_left_out_in_evaluation(tmp_path):
    broken = parquet(tmp_path, list(range(10)), broken=(3,))
    data = module(tmp_path, broken, validation=broken, max_bad_share=0.5, batch_size=10, num_classes=10)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert len(batch["label"]) == 10
    assert 3 not in batch["sample_index"]
    assert torch.equal(batch["label"], batch["sample_index"])
    evaluated = [row for batch in data.val_dataloader() for row in batch["sample_index"].tolist()]
    assert evaluated == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert data.account("train").causes == Counter({"not an image": 1})
    strict = module(tmp_path, broken, max_bad_share=0.0, batch_size=10, num_classes=10)
    strict.setup("fit")
    with pytest.raises(BadDataError, match="1 of 11"):
        list(strict.train_dataloader())


@pytest.mark.parametrize(
    ("labels", "options", "sentence"),
    [
        ([0, 1, 5], {"num_classes": 5}, r"a label from 0 to 4, got 5 in .*row 2 \(train split\)"),
        ([0, -1, 1], {}, r"got -1 in .*row 1"),
        (
            ["cat", "ape"],
            {"class_names": ["cat", "apes"]},
            r"a label among .*, of which 'apes' .* got 'ape'",
        ),
        (["cat", "ape"], {"num_classes": 1}, "class names, got 2"),
        ([0, 1], {"label_column": "labels"}, "set data.label_column to 'label'"),
        ([0.5, 1.0], {}, "Expected integers or names .* set data.label_column"),
        (
            ["0", "a", "1", "b"],
            {},
            r"the integer 0 in .*row 0 and the name 'a' in .*row 1: write all of",
        ),
        (["0", "1", "1.5"], {}, r"the integer 0 in .* and the name '1.5' in .*row 2"),
        (["0.5", "nan", "1e5"], {}, r"Expected integers or names as labels, got '0.5' in .*row 0: write integers"),
        (
            [0, 10**12, 1],
            {},
            r"got 3 different ones up to 1000000000000, as in .*row 1: correct the lab",
        ),
        (["1", "2", "10"], {}, "got 3 different ones up to 10, as in"),
        ([-1, -1], {}, "Expected labels to count the classes, got none"),
        ([[0, 1], [0, 2]], {}, "Expected integers or names .* set data.label_column"),
    ],
    ids=str,
)
def test_labels_that_cannot_be_are_named(tmp_path, labels, options, sentence):
    data = module(tmp_path, parquet(tmp_path, labels), **options)
    with pytest.raises(UserError, match=sentence):
        data.setup("fit")


def listed(folder, labels):
    """A JSON list with an image for each label."""
    rows = [{"image": f"{row}.png", "label": label} for row, label in enumerate(labels)]
    for row in range(len(labels)):
        draw_image(row).save(folder / f"{row}.png")
    (folder / "rows.json").write_text(json.dumps(rows))
    return str(folder / "rows.json")


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0, "a", 1, "b"], r"the integer 0 in .*row 0 and the name 'a' in .*row 1"),
        ([True, 0, 1], r"the integer 0 in .*row 1 and the name 'True' in .*row 0"),
        ([0.0, 1.0, 1.5], r"Expected integers or names as labels, got '0.0' in .*row 0"),
        ([0, 10**12], "up to 1000000000000"),
    ],
    ids=str,
)
def test_labels_of_json_that_cannot_be_are_named(tmp_path, labels, sentence):
    with pytest.raises(UserError, match=sentence):
        module(tmp_path, listed(tmp_path, labels)).setup("fit")


def test_an_image_with_several_labels_is_a_bad_row(tmp_path):
    data = module(tmp_path, None, test=listed(tmp_path, [0, [1], [0, 1], 1]), max_bad_share=0.5)
    data.setup("test")
    assert [batch["label"].tolist() for batch in data.test_dataloader()] == [[0, 1, 1]]
    assert data.account("test").causes == Counter({"several labels": 1})


def test_names_of_numbers_and_gaps_may_be_given(tmp_path):
    data = module(tmp_path, listed(tmp_path, ["0.5", "1.0"]), class_names=["1.0", "0.5"])
    data.setup("fit")
    assert labels_by_row(data) == [1, 0]
    with pytest.warns(UserWarning, match="no image of 1 of the 3 classes that the labels up to 2 make, such as 1"):
        module(tmp_path, listed(tmp_path, [0, 2])).setup("fit")
    given = module(tmp_path, listed(tmp_path, [0, 10]), num_classes=11)
    given.setup("fit")
    assert labels_by_row(given) == [0, 10]


def test_true_and_false_are_names(tmp_path):
    data = module(tmp_path, listed(tmp_path, [True, False]))
    data.setup("fit")
    assert data.class_names == ("False", "True")
    assert labels_by_row(data) == [1, 0]


def test_validation_with_an_unknown_class_is_refused(tmp_path):
    data = module(
        tmp_path,
        parquet(tmp_path, ["ape", "cat"]),
        validation=parquet(tmp_path, ["ape", "cats"], "validation.parquet"),
    )
    with pytest.raises(UserError, match=r"'cat' is the nearest, got 'cats' in .*validation"):
        data.setup("fit")


def test_image_outside_of_a_class_folder_is_named(tmp_path):
    (tmp_path / "images").mkdir()
    draw_image(0).save(tmp_path / "images" / "0.png")
    with pytest.raises(UserError, match=r"one folder per class .* directly in it"):
        module(tmp_path, str(tmp_path / "images")).setup("fit")


def test_classes_of_training_travel_in_the_state(tmp_path):
    data = module(tmp_path, parquet(tmp_path, ["dog", "ape", "cat", "dog"]))
    data.setup("fit")
    state = data.state_dict()
    assert state["class_names"] == ["ape", "cat", "dog"]
    later = module(tmp_path, None, test=parquet(tmp_path, ["dog", "cat"], "test.parquet"))
    later.setup("test")
    later.load_state_dict(state)
    (batch,) = later.test_dataloader()
    assert batch["label"].tolist() == [2, 1]
    assert later.num_classes == 3


def test_prediction_needs_no_labels(tmp_path):
    rows = {"image": [{"bytes": encoded(draw_image(row)), "path": None} for row in range(3)]}
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "new.parquet")
    data = module(tmp_path, None, predict=str(tmp_path / "new.parquet"))
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert batch.keys() == {"image", "sample_index"}
    assert batch["sample_index"].tolist() == [0, 1, 2]


def test_prediction_takes_images_from_any_folder(tmp_path):
    (tmp_path / "new" / "inner").mkdir(parents=True)
    for row, name in enumerate(("0.png", "1.png", "inner/2.png")):
        draw_image(row).save(tmp_path / "new" / name)
    data = module(tmp_path, None, predict=str(tmp_path / "new"))
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert batch.keys() == {"image", "sample_index"}
    expected = torch.stack([data.eval_transform(draw_image(row)) for row in range(3)])
    torch.testing.assert_close(batch["image"], expected)


def test_rows_can_be_thinned(tmp_path):
    data = module(tmp_path, parquet(tmp_path, list(range(10))), limit_train_rows=4, num_classes=10)
    data.setup("fit")
    assert labels_by_row(data) == [0, 2, 5, 7]


def test_cifar_transform_is_crop_of_the_padded_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    transform = CIFARTrainTransform()
    mean, std = (torch.tensor(values)[:, None, None] for values in (CIFAR100_MEAN, CIFAR100_STD))
    padded = torch.zeros(3, 40, 40)
    padded[:, 4:36, 4:36] = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    crops = [(padded[:, top : top + 32, left : left + 32] - mean) / std for top in range(9) for left in range(9)]
    crops += [crop.flip(-1) for crop in crops]
    seen = set()
    for _ in range(40):
        result = transform(Image.fromarray(pixels))
        (which,) = [n for n, crop in enumerate(crops) if torch.allclose(crop, result, atol=1e-5)]
        seen.add(which)
    assert len(seen) > 20
    assert any(which >= 81 for which in seen)
    assert any(which < 81 for which in seen)


def test_imagenet_transform_takes_the_middle_of_256():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 512, 3), dtype=np.uint8))
    transform = ImageNetEvalTransform()
    assert transform.resize.size == [256]
    assert transform(image).shape == (3, 224, 224)


def test_drawn_classes_are_functions_of_seed_split_and_number():
    table, same, other = (ShapeClassTable(split, 80, 32, 0, 60) for split in ("train", "train", "test"))
    for row in (0, 41):
        first, again, elsewhere = (np.asarray(t.image(row)) for t in (table, same, other))
        assert (first == again).all()
        assert (first != elsewhere).any()
    assert [table.label(row) for row in range(80)] == [*range(40), *range(40)]
    assert CLASSES[0] == "red circle"
    quiet = np.asarray(ShapeClassTable("train", 80, 32, 0, 0).image(41), dtype=float)
    ground = (quiet > 125) & (quiet < 131)  # far from black and white, which cut noise off
    assert (np.asarray(table.image(41)) - quiet)[ground].std() == pytest.approx(60, abs=3)
    with pytest.raises(UserError, match=r"data.noise of at least 0, got -1"):
        ShapeClassesDataModule(noise=-1)
    assert len(set(CLASSES)) == 40


def test_drawn_classes_through_a_trainer_resume_in_order(tmp_path):
    data = ShapeClassesDataModule(length=16, eval_length=4, batch_size=4, image_size=8, seed=3)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    data.setup("fit")
    rows = sorted(row for batch in data.train_dataloader() for row in batch["sample_index"].tolist())
    assert rows == list(range(16))
