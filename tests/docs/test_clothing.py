"""The pictures of real images are drawn from a training; no real image is needed to test that."""

import io
import runpy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from support.project.pages import ROOT
from support.runs.command_line import run

SHOWN = runpy.run_path(str(ROOT / "docs/figures/clothing.py"))
SMALL = (
    *("--model.vision.width=16", "--model.vision.depth=1", "--model.vision.heads=2", "--model.vision.patch_size=16"),
    *("--model.text.width=16", "--model.text.heads=2", "--model.text.ffn_width=32", "--model.text.depth=1"),
    *("--model.contrast.embed_dim=8", "--model.contrast.queue_size=8", "--data.image_size=32", "--data.batch_size=4"),
    *("--data.num_workers=0", "--trainer.max_steps=1", "--trainer.precision=32-true", "--trainer.accelerator=cpu"),
)


@pytest.fixture
def clothing(tmp_path: Path):
    """Two images of each of the ten labels, in three splits."""
    rows = []
    for number in range(20):
        buffer = io.BytesIO()
        Image.effect_noise((40, 30), 50).convert("RGB").save(buffer, "PNG")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": number % 10})
    (tmp_path / "clothing").mkdir()
    for split in ("train", "validation", "test"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "clothing" / f"{split}.parquet")
    return tmp_path / "clothing"


def test_the_pictures_are_drawn_from_a_training(clothing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    SHOWN["write_pairs"](clothing, tmp_path / "pairs")
    captions = pq.read_table("pairs/test.parquet")["caption"].to_pylist()
    assert captions[:2] + captions[10:11] == ["a photo of a dress", "a photo of a hat", "a photo of a dress"]
    configs = [f"--config={ROOT / name}" for name in ("configs/albef/quickstart.yaml", "docs/figures/clothing.yaml")]
    ran = run("fit", *configs, *SMALL)
    assert ran.status == 0, ran.err
    assert run("export", "runs/clothing/version_0/checkpoints/last.ckpt", "clothing-albef").status == 0
    Path("images").mkdir()
    said = SHOWN["draw"](Path("clothing-albef"), clothing / "test.parquet", Path("images"))
    assert said.endswith("of 20 images have the highest cosine with their own caption of 10.")
    for file in ("clothing_found.png", "clothing_words.png", "clothing_map.png"):
        with Image.open(f"images/{file}") as image:
            assert min(image.size) > 200
            assert image.convert("L").getextrema() != (255, 255)


def test_only_images_of_the_queried_garment_are_marked_as_right():
    images = [Image.new("RGB", (4, 4), (number, 0, 0)) for number in range(12)]
    labels = torch.tensor([number % 6 for number in range(12)])
    cosines = torch.linspace(0, 1, 12).repeat(10, 1)
    rows = SHOWN["found"](images, labels, cosines)
    assert [row.text for row in rows][:2] == ["a photo of a dress", "a photo of a hat"]
    for query, row in enumerate(rows):
        assert [panel.image.getpixel((0, 0))[0] for panel in row.panels] == [11, 10, 9, 8]
        assert [panel.right for panel in row.panels] == [query == label for label in (5, 4, 3, 2)]


def test_no_more_than_forty_images_are_shown():
    assert SHOWN["QUERIES"] * SHOWN["BEST"] + SHOWN["MAPPED"] <= 40
