"""Boxes of augmentations on images of other sizes, of other orientations, and beside a downloader's notes."""

import json

import pytest
import torch
from PIL import Image

from support.data.images import draw_image, encoded
from support.data.reinforced_shards import COUNT, batches, module, shards
from support.methods import reinforced as made
from vlightning.common.errors import UserError


def smaller(number, members, record=None):
    """A downloaded copy of half the size."""
    members["jpg"] = encoded(draw_image(number, made.SIZE).resize((20, 16)), "JPEG", quality=95)
    if record == "own":
        members["paug.json"] = json.dumps(
            {"param_aug": made.augmentations(number), "original_height": 32, "original_width": 40}
        ).encode()
    if record == "downloader":
        members["json"] = json.dumps({"uid": "1", "original_height": 32, "original_width": 40}).encode()


@pytest.mark.parametrize("record", ["own", "downloader"])
def test_boxes_are_rescaled_to_a_image_of_another_size_and_counted(tmp_path, record, caplog):
    folder = shards(tmp_path / "data", change=lambda number, members: smaller(number, members, record))
    data = module(tmp_path, folder)
    with caplog.at_level("INFO"):
        found = batches(data)
    assert data.account("train").remarks == {"box rescaled": COUNT}
    assert not data.account("train").causes
    assert "'box rescaled' so far: 12 of 12" in caplog.text
    original = module(tmp_path, shards(tmp_path / "original"))
    for small, large in zip(found, batches(original), strict=True):
        assert torch.equal(small["teacher_image"], large["teacher_image"])
        assert (small["image"] - large["image"]).abs().mean() < 0.02


def test_what_a_downloader_noted_can_be_ignored(tmp_path):
    """A generator that ran on the downloaded copies measured on those, whatever they were before."""

    def noted(number, members):
        members["json"] = json.dumps({"original_height": 320, "original_width": 400}).encode()

    data = module(tmp_path, shards(tmp_path / "data", change=noted), other_sizes="ignore")
    plain = module(tmp_path, shards(tmp_path / "plain"))
    for one, other in zip(batches(data), batches(plain), strict=True):
        assert torch.equal(one["image"], other["image"])
    assert not data.account("train").remarks
    rescaled = module(tmp_path, str(tmp_path / "data"))
    batches(rescaled)
    assert rescaled.account("train").remarks == {"box rescaled": COUNT}


@pytest.mark.parametrize(
    ("record", "options", "cause"),
    [
        (None, {}, "box outside the image: 12"),
        ("own", {"other_sizes": "ignore"}, "box outside the image: 12"),
        ("own", {"other_sizes": "refuse"}, "image size differs from recorded: 12"),
        ("downloader", {"other_sizes": "refuse"}, "image size differs from recorded: 12"),
    ],
)
def test_images_of_another_size_can_be_refused(tmp_path, record, options, cause):
    folder = shards(tmp_path / "data", change=lambda number, members: smaller(number, members, record))
    with pytest.raises(UserError, match=cause):
        module(tmp_path, folder, **options)


def test_boxes_are_pixels_of_the_image_before_anybody_turns_it(tmp_path):
    def tagged(number, members):
        exif = Image.Exif()
        exif[0x0112] = 6  # lies on its side
        members["jpg"] = encoded(draw_image(number, made.SIZE), "JPEG", quality=90, exif=exif)

    turned = module(tmp_path, shards(tmp_path / "turned", change=tagged))
    plain = module(tmp_path, shards(tmp_path / "plain"))
    for one, other in zip(batches(turned), batches(plain), strict=True):
        assert torch.equal(one["image"], other["image"])
