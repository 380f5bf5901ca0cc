"""Small image files and helpers that the datamodule tests share."""

import datasets
import pytest

from support.data.small_files import Files
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
