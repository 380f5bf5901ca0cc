"""Every form of one's own data that the table of docs/data.md names, trained from as a user does."""

import json
import re
from pathlib import Path
from typing import ClassVar

import datasets
import pytest
import torch
import yaml

from support.data.images import draw_image, encoded
from support.methods.tiny import ImageModel
from support.runs.command_line import run
from vlightning.datamodules import ImageTextDataModule, Source

PAGE = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text()
TABLE = PAGE.split("| source | given as |")[1].split("\n\n")[0]
ROWS, BATCH = 6, 2
CAPTIONS = [f"image number {number}" for number in range(ROWS)]
OPTIONS = {
    "model": "RecordingModel",
    "trainer.max_epochs": 1,
    "trainer.accelerator": "cpu",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "checkpoint.save_top_k": 0,
}


class RecordingModel(ImageModel):
    """Keeps what it is trained on."""

    seen: ClassVar[list[dict[str, torch.Tensor]]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append({key: value.clone() for key, value in batch.items()})
        return super().training_step(batch, batch_idx)


def parquet(files, _):
    files.parquet(ROWS, "tables/pairs.parquet")
    return ["tables/pairs.parquet", "tables/*.parquet", "tables"]


def lists(files, _):
    items = [{"image": path, "caption": text} for path, text in zip(files.images(ROWS), CAPTIONS, strict=True)]
    names = [files.json(items, name) for name in ("pairs.json", "pairs.jsonl")]
    lines = ["image,caption", *(",".join(item.values()) for item in items)]
    (files.folder / "pairs.csv").write_text("\n".join(lines))
    return [*names, "pairs.csv", ["pairs.json"]]


def folder(files, _):
    items = zip(files.images(ROWS), CAPTIONS, strict=True)
    files.json([{"file_name": path, "caption": text} for path, text in items], "metadata.jsonl")
    return [str(files.folder)]


def tars(files, _):
    members = [((f"{n}.png", encoded(draw_image(n))), (f"{n}.txt", CAPTIONS[n].encode())) for n in range(ROWS)]
    files.tar([member for pair in members for member in pair])
    return ["shard.tar", "*.tar"]


def karpathy(files, _):
    images = [
        {"filename": path, "split": "train", "imgid": number, "sentences": [{"raw": CAPTIONS[number]}]}
        for number, path in enumerate(files.images(ROWS))
    ]
    (files.folder / "dataset_coco.json").write_text(json.dumps({"images": images}))
    return ["dataset_coco.json", {"path": "dataset_coco.json", "split": "train"}]


def saved(files, _):
    datasets.Dataset.from_parquet(files.parquet(ROWS), cache_dir="cache").save_to_disk("saved")
    return ["saved"]


def hub(files, monkeypatch):
    """The hub itself cannot be reached from a test; everything on the way to the library's call is real."""
    rows = datasets.DatasetDict(train=datasets.Dataset.from_parquet(files.parquet(ROWS), cache_dir="cache"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: {"user/name": rows}[name])
    return ["user/name"]


FORMS = {
    "Parquet": parquet,
    "JSON list in ALBEF's form, JSON lines, CSV": lists,
    "folder of images": folder,
    "WebDataset": tars,
    "Karpathy's splits": karpathy,
    "saved by `datasets`": saved,
    "hub": hub,
}


def epoch(*words):
    """The batches of an epoch of `vlightning fit`."""
    RecordingModel.seen.clear()
    ran = run("fit", *(f"--{name}={value}" for name, value in OPTIONS.items()), *words)
    assert ran.status == 0, ran.err
    return list(RecordingModel.seen)


def same(batches, others):
    return len(batches) == len(others) and all(
        batch.keys() == other.keys() and all(torch.equal(batch[key], other[key]) for key in batch)
        for batch, other in zip(batches, others, strict=True)
    )


def test_the_table_has_no_other_rows():
    assert re.findall(r"^\| ([^|-][^|]*?) \|", TABLE, re.M) == list(FORMS)


@pytest.mark.parametrize("row", FORMS)
def test_an_epoch_is_the_same_from_python_yaml_and_the_command_line(row, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files.folder)
    (files.folder / "tables").mkdir()
    settings = {"batch_size": BATCH, "num_workers": 0, "image_size": 16, "vocab_size": 300, "image_root": "."}
    settings["cache_dir"] = str(tmp_path / "cache")
    for source in FORMS[row](files, monkeypatch):
        data = ImageTextDataModule(train=Source(**source) if isinstance(source, dict) else source, seed=0, **settings)
        data.setup("fit")
        expected = list(data.train_dataloader())
        assert sum(len(batch["image"]) for batch in expected) == ROWS

        init_args = {"train": source, **settings}
        Path("data.yaml").write_text(
            yaml.safe_dump({"data": {"class_path": "ImageTextDataModule", "init_args": init_args}})
        )
        assert same(epoch("--config=data.yaml"), expected), source
        typed = {name: value if isinstance(value, str) else json.dumps(value) for name, value in init_args.items()}
        words = [f"--data.{name}={value}" for name, value in typed.items()]
        assert same(epoch("--data=ImageTextDataModule", *words), expected), source


def test_captions_as_rows_and_weights_of_sources_from_the_command_line(files, tmp_path, monkeypatch):
    monkeypatch.chdir(files.folder)
    pairs = [{"image": path, "caption": ["one", "two"]} for path in files.images(ROWS)]
    sources = [{"path": files.json(pairs[:2], "few.json"), "weight": 2}, files.json(pairs[2:], "many.json")]
    settings = {"train": sources, "batch_size": BATCH, "num_workers": 0, "image_size": 16, "vocab_size": 300}
    data = ImageTextDataModule(**settings, samples="captions", seed=0, cache_dir=str(tmp_path / "cache"))
    data.setup("fit")
    expected = list(data.train_dataloader())
    assert sum(len(batch["image"]) for batch in expected) == 2 * (2 * 2) + 4 * 2
    words = [f"--data.{name}={json.dumps(value)}" for name, value in settings.items()]
    words += ["--data.samples=captions", f"--data.cache_dir={tmp_path / 'cache'}"]
    assert same(epoch("--data=ImageTextDataModule", *words), expected)
