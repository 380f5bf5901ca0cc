"""Karpathy's files as they are distributed: one for all splits."""

import pytest

from vlightning.common.errors import UserError
from vlightning.datamodules import Source

COCO = ["train", "restval", "val", "train", "test", "restval"]
FLICKR = ["train", "val", "train", "test"]


@pytest.fixture
def karpathy(files):
    """Writes a file of the form, with three captions for each image."""

    def make(splits, coco=True, name="dataset.json", **changes):
        images = []
        for number, path in enumerate(files.images(len(splits))):
            folder, _, file = path.rpartition("/")
            image = {
                "filename": file if coco else path,
                "imgid": number,
                "split": splits[number],
                "sentids": [3 * number, 3 * number + 1, 3 * number + 2],
                "sentences": [
                    {"tokens": ["a"], "raw": f"caption {letter} {'x' * (number + 1)}.", "imgid": number}
                    for letter in "abc"
                ],
            }
            images.append(image | ({"filepath": folder, "cocoid": 500 + number} if coco else {}) | changes)
        return files.json({"images": images, "dataset": "coco" if coco else "flickr30k"}, name)

    return make


def read(data, split):
    data.prepare_data()
    data.setup({"train": "fit", "validation": "validate", "test": "test", "predict": "predict"}[split])
    loaders = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}
    return list(getattr(data, f"{loaders[split]}_dataloader")())


def numbers(batches):
    return sorted(index for batch in batches for index in batch["image_id"].tolist())


@pytest.mark.parametrize("streaming", [False, True])
def test_each_argument_takes_its_split_of_one_file(karpathy, module, streaming):
    file = karpathy(COCO)
    options = {"streaming": True, "samples_per_epoch": 4} if streaming else {}
    data = module(train=file, validation=file, test=file, predict=file, batch_size=2, **options)
    assert numbers(read(data, "train")) == [500, 501, 503, 505]
    for split, expected in (("validation", 502), ("test", 504), ("predict", 504)):
        (batch,) = read(data, split)
        assert batch["image_id"].tolist() == [expected]
        assert batch["text_image_id"].tolist() == [expected] * 3
        assert batch["image"].shape[0] == 1
    texts = data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert texts == [f"caption {letter} xxxxx." for letter in "abc"]


def test_flickr30k_has_no_folders_no_restval_and_ids_of_its_own(karpathy, module):
    file = karpathy(FLICKR, coco=False)
    data = module(train=file, validation=file, test=file, batch_size=1)
    assert numbers(read(data, "train")) == [0, 2]
    assert numbers(read(data, "validation")) == [1]
    assert numbers(read(data, "test")) == [3]


@pytest.mark.parametrize(
    ("split", "expected"), [("train", [500, 503]), ("restval", [501, 505]), ("train+val", [500, 502, 503])]
)
def test_other_splits_are_chosen_by_name(karpathy, module, split, expected):
    data = module(train=Source(karpathy(COCO), split=split), batch_size=1)
    assert numbers(read(data, "train")) == expected


def test_an_image_is_one_row_and_training_draws_one_of_its_captions(karpathy, module):
    data = module(train=karpathy(COCO), batch_size=4)
    data.setup("fit")
    loader = data.train_dataloader()
    drawn = set()
    for _ in range(12):
        (batch,) = loader
        drawn |= set(data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True))
    assert drawn == {f"caption {letter} {'x' * (number + 1)}." for number in (0, 1, 3, 5) for letter in "abc"}


def test_images_lie_under_image_root(karpathy, files, module, tmp_path):
    file = karpathy(COCO)
    (tmp_path / "elsewhere").mkdir()
    moved = (files.folder / "dataset.json").rename(tmp_path / "elsewhere/dataset.json")
    data = module(train=str(moved), image_root=str(files.folder), batch_size=4)
    assert len(read(data, "train")) == 1
    assert data.image_name("train", 1) == str(files.folder / "images/1.png")
    assert not (files.folder / file).exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_that_is_not_there_is_named_with_those_that_are(karpathy, module, streaming):
    options = {"streaming": True, "samples_per_epoch": 4} if streaming else {}
    message = r"^Expected the splits dev in '.*dataset.json', got test, train, val: name one of them as `split`, or"
    with pytest.raises(UserError, match=message):
        read(module(train=Source(karpathy(FLICKR), split="train+dev"), **options), "train")
    with pytest.raises(UserError, match="Expected the splits val in"):
        read(module(train=Source(karpathy(FLICKR)), validation=karpathy(["train"], name="no_val.json")), "validation")


@pytest.mark.parametrize(
    "changes", [{"sentences": None}, {"sentences": [{"tokens": []}]}, {"filename": 3}, {"split": None}]
)
def test_an_incomplete_image_is_named(karpathy, module, changes):
    with pytest.raises(UserError, match=r"^Expected images as objects with .* got no such object in '.*dataset.json'"):
        read(module(train=karpathy(["train"], **changes)), "train")


def test_another_object_is_not_taken_for_one(files, module):
    with pytest.raises(
        UserError, match=r"^Expected a list .* got a JSON object with the keys annotations, info in '.*'"
    ):
        read(module(train=files.json({"annotations": [], "info": {}})), "train")
