"""Rows in memory in place of a source: each form gives the rows that a file gives."""

import io

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from support.data.images import draw_image, encoded
from support.data.pair_files import opened
from support.methods.tiny import TinyModel
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageClassificationDataModule, VQADataModule
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.base.memory import stored_image

IMAGES = [draw_image(number).convert("RGB") for number in range(8)]
TEXTS = [f"image number {number}" for number in range(8)]


class Pairs(torch.utils.data.Dataset):
    """A data set of torch; with `classes`, as those of torchvision."""

    def __init__(self, rows, classes=None):
        self.rows = rows
        self.classes = classes

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        if number >= len(self.rows):
            raise IndexError
        return self.rows[number]


def forms(folder):
    paths = []
    for number, image in enumerate(IMAGES):
        image.save(folder / f"{number}.png")
        paths.append(str(folder / f"{number}.png"))
    arrays = [np.asarray(image) for image in IMAGES]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    columns = {"image": IMAGES, "caption": TEXTS}
    return {
        "pairs of images": list(zip(IMAGES, TEXTS, strict=True)),
        "pairs of paths": list(zip(paths, TEXTS, strict=True)),
        "pairs of bytes": [(encoded(image, "PNG"), text) for image, text in zip(IMAGES, TEXTS, strict=True)],
        "arrays": list(zip(arrays, TEXTS, strict=True)),
        "tensors": list(zip(tensors, TEXTS, strict=True)),
        "floats": [(tensor / 255, text) for tensor, text in zip(tensors, TEXTS, strict=True)],
        "mappings": [{"image": image, "caption": [text]} for image, text in zip(IMAGES, TEXTS, strict=True)],
        "columns": columns,
        "pandas": pd.DataFrame({"image": paths, "caption": TEXTS}),
        "datasets": datasets.Dataset.from_dict(columns),
        "torch": Pairs(list(zip(IMAGES, TEXTS, strict=True))),
        "torch of mappings": Pairs([{"image": path, "caption": text} for path, text in zip(paths, TEXTS, strict=True)]),
    }


FORMS = [
    "pairs of images",
    "pairs of paths",
    "pairs of bytes",
    "arrays",
    "tensors",
    "floats",
    "mappings",
    "columns",
    "pandas",
    "datasets",
    "torch",
    "torch of mappings",
]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_rows_of_a_file(module, tmp_path, form):
    data = opened(module, train=forms(tmp_path)[form])
    rows = data.opened_rows("train")
    assert [rows.captions(row) for row in range(8)] == [[text] for text in TEXTS]
    for row, image in enumerate(IMAGES):
        assert np.array_equal(np.asarray(data.image("train", row)), np.asarray(image))
    (batch, _) = data.train_dataloader()
    assert batch["image"].shape == (4, 3, 16, 16)
    assert "train" not in data.hparams
    assert data.hparams["batch_size"] == 4


def test_every_form_is_tried(tmp_path):
    assert list(forms(tmp_path)) == FORMS


def test_a_frame_of_polars_has_the_rows_of_a_file(module, tmp_path):
    paths = [pair[0] for pair in forms(tmp_path)["pairs of paths"]]
    data = opened(
        module, train=pl.DataFrame({"photo": paths, "title": TEXTS}), image_column="photo", caption_column="title"
    )
    assert data.opened_rows("train").captions(5) == [TEXTS[5]]


def test_ids_and_several_captions_are_read_and_nothing_is_empty(module):
    frame = pd.DataFrame(
        {"image": IMAGES[:4], "caption": [["a", "b"], "c", float("nan"), "d"], "image_id": [3, 3, 5, 6]}
    )
    data = opened(module, "test", train=frame, test=frame)
    rows = data.opened_rows("test")
    assert [rows.captions(row) for row in range(4)] == [["a", "b"], ["c"], [], ["d"]]
    assert rows.images() == [[0, 1], [2], [3]]
    triples = opened(module, train=[(image, text, 7) for image, text in zip(IMAGES, TEXTS, strict=True)])
    assert triples.opened_rows("train").images() == [list(range(8))]


def test_labels_are_names_numbers_and_those_that_a_data_set_lists():
    def labeled(rows, **options):
        return opened(ImageClassificationDataModule, train=rows, batch_size=4, num_workers=0, **options)

    numbers = labeled([(image, np.int64(number % 2)) for number, image in enumerate(IMAGES)])
    assert (numbers.num_classes, numbers.class_names) == (2, None)
    names = labeled(pd.DataFrame({"image": IMAGES, "label": ["cat", "dog"] * 4}), split="0.5/0.5")
    assert names.class_names == ("cat", "dog")
    assert len(names.opened_rows("validation")) == 4
    listed = labeled(Pairs([(image, number % 2) for number, image in enumerate(IMAGES)], ["ant", "bee", "cat"]))
    assert listed.class_names == ("ant", "bee", "cat")
    assert set(next(iter(listed.train_dataloader()))["label"].tolist()) <= {0, 1}


def test_the_orientation_of_an_opened_photograph_is_kept(module):
    photo = Image.new("RGB", (40, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    content = io.BytesIO()
    photo.save(content, "JPEG", exif=exif)
    image = Image.open(io.BytesIO(content.getvalue()))
    data = opened(module, train=[(image, "a"), (IMAGES[0], "b")] * 2)
    assert data.image("train", 0).size == (20, 40)


def test_a_bad_row_is_counted_and_the_others_are_read(module):
    rows = [(IMAGES[0], "a"), (object(), "b"), (None, "c"), (torch.full((3, 4, 4), 2.0), "d")]
    data = opened(module, train=rows, max_bad_share=1.0)
    (batch,) = data.train_dataloader()
    assert batch["sample_index"].tolist() == [0] * 4
    rows = data.opened_rows("train")
    causes = []
    for row in (1, 2, 3):
        with pytest.raises(BadSample) as raised:
            rows.image(row)
        causes.append(raised.value.fault.cause)
    assert causes == ["object in place of an image", "no image", "pixels outside of 0 to 1"]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([1, 2], "Expected a file, a folder, a hub name or rows, got int: convert it."),
        (7, "Expected a file, a folder, a hub name or rows, got int: convert it."),
        ((number for number in range(3)), "Expected a file, a folder, a hub name or rows, got generator: convert it."),
        (
            Pairs([1, 2]),
            "Expected rows as (image, text) pairs, mappings with data.image_column and data.caption_column",
        ),
        (
            {"image": IMAGES, "title": TEXTS},
            "Expected the column 'caption' in 'rows in memory (dict)', got the columns",
        ),
        ([{"photo": IMAGES[0], "caption": "a"}], "Expected the column 'image' in 'rows in memory (list)'"),
        (
            [(object(), "a")],
            "Expected images with captions in the train split ('rows in memory (list)'), got no usable",
        ),
        (Pairs([]), "Expected rows in rows in memory (Pairs), got none: check the rows."),
    ],
)
def test_a_mistake_is_one_sentence(module, rows, sentence):
    with pytest.raises(UserError) as raised:
        opened(module, train=rows)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_other_datamodules_and_streams_ask_for_files(module, tmp_path):
    rows = list(zip(IMAGES, TEXTS, strict=True))
    with pytest.raises(UserError, match="got rows in memory: set data"):
        opened(module, train=rows, streaming=True, samples_per_epoch=8)
    with pytest.raises(UserError, match="which the datamodules of pairs and labels read: write them to a file"):
        opened(VQADataModule, train=rows, num_workers=0)


def test_a_checkpoint_of_such_a_fit_loads_as_plain_data(module, tmp_path):
    data = module(train=list(zip(IMAGES, TEXTS, strict=True)))
    trainer = Trainer(
        max_steps=0, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(TinyModel(dim=5), data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "train" not in content["datamodule_hyper_parameters"]


def test_floats_are_rounded_to_the_nearest_of_256_levels():
    levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, -1, -1)
    decoded = Image.open(io.BytesIO(stored_image(levels / 255)["bytes"]))
    assert np.array_equal(np.asarray(decoded), levels.permute(1, 2, 0).numpy())
    between = Image.open(io.BytesIO(stored_image(torch.full((3, 2, 2), 0.999))["bytes"]))  # 254.7
    assert between.getpixel((0, 0)) == (255, 255, 255)
