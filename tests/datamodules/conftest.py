"""Small image files and helpers that the datamodule tests share."""

import io
import json
import tarfile
from pathlib import Path

import datasets
import pytest

from support.data.images import draw_image, encoded
from vlightning.datamodules import ImageTextDataModule


@pytest.fixture(autouse=True)
def quiet_library():
    datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))


class Files:
    """Writes the same pairs in each of the supported forms."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def images(self, count):
        (self.folder / "images").mkdir(exist_ok=True)
        for number in range(count):
            draw_image(number).save(self.folder / "images" / f"{number}.png")
        return [f"images/{number}.png" for number in range(count)]

    def parquet(self, count, name="pairs.parquet", captions=None, **columns):
        rows = {
            "image": [{"bytes": encoded(draw_image(number)), "path": None} for number in range(count)],
            "caption": captions or [f"image number {number}" for number in range(count)],
            **columns,
        }
        features = datasets.Dataset.from_dict(rows).features.copy()
        features["image"] = datasets.Image()
        path = self.folder / name
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
        return str(path)

    def json(self, items, name="pairs.json"):
        path = self.folder / name
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(item) + "\n" for item in items))
        else:
            path.write_text(json.dumps(items))
        return str(path)

    def tar(self, members, name="shard.tar"):
        path = self.folder / name
        with tarfile.open(path, "w") as tar:
            for member, content in members:
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return str(path)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return Files(folder)


@pytest.fixture
def module(tmp_path):
    """Makes an ImageTextDataModule with small numbers."""

    def make(**options):
        defaults = {
            "batch_size": 4,
            "num_workers": 0,
            "image_size": 16,
            "vocab_size": 300,
            "cache_dir": str(tmp_path / "cache"),
        }
        return ImageTextDataModule(**{**defaults, **options})

    return make
