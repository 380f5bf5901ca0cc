"""`vlightning embed` stores the features of a tower, unnormalized, and captioning trains on them without the images."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from support.data.images import draw_image
from support.methods.captioning import CAPTIONS, SIZES, write_language_model
from support.methods.clip import SIZE
from support.methods.groups import command_line
from support.methods.mmlg import trained_checkpoint
from support.methods.published import write_published
from support.runs.command_line import run
from vlightning.commands.evaluate.model import load_model
from vlightning.common.preprocessing import Preprocessing
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules import CaptioningModule

IMAGES = len(CAPTIONS)


def write_images(folder):
    """Images in a folder and their captions in Karpathy's form, one of the images in each of the other splits."""
    (folder / "images").mkdir(parents=True)
    splits = ["train", "train", "restval", "train", "val", "test"]
    images = []
    for number, split in enumerate(splits):
        draw_image(number).save(folder / "images" / f"{number}.png")
        sentences = [{"raw": text} for text in CAPTIONS[number]]
        images.append({"filename": f"{number}.png", "filepath": "images", "split": split, "sentences": sentences})
        images[-1]["cocoid"] = 100 + number
    (folder / "dataset.json").write_text(json.dumps({"images": images}))
    return str(folder / "dataset.json")


def embedded(model, captions, output):
    every = json.dumps({"path": captions, "split": "train+restval+val+test"})
    words = ("--data.image_root=data", "--data.cache_dir=cache", "--num_workers=0", "--accelerator=cpu")
    ran = run("embed", model, "--of=images", "--data.predict", every, *words, f"--output={output}")
    assert ran.status == 0, ran.err
    return every


@pytest.mark.parametrize(
    "options", [{"student": "plain", "depth": 3}, {"student": "MM-LG"}], ids=["a descendant", "an auxiliary"]
)
def test_the_tower_of_a_training_is_stored_as_it_is(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    module, path = trained_checkpoint(tmp_path, **options)
    content = torch.load(path, weights_only=True)
    content["data"] = {"preprocessing": Preprocessing(SIZE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic").as_dict()}
    torch.save(content, path)  # as a datamodule has it
    embedded(path, write_images(tmp_path / "data"), "store")
    prepare = load_model(path).prepared
    with torch.no_grad():
        expected = module.student.encode_image(torch.stack([prepare(draw_image(number)) for number in range(IMAGES)]))
    store = FeatureStore("store")
    features = torch.stack([store.image(row) for row in range(IMAGES)])
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert (features.norm(dim=1) - 1).abs().min() > 0.1
    assert store.image_ids() == list(range(100, 100 + IMAGES))
    assert prepare(draw_image(0)).shape == (3, SIZE, SIZE)


def test_the_command_line_embeds_trains_tests_and_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captions = write_images(tmp_path / "data")
    gpt2 = write_language_model("gpt2", steps=100)
    own = ("--data.image_root", "data", "--data.cache_dir", "cache", "--data.num_workers", "0")
    every = embedded(str(write_published(tmp_path / "clip")), captions, "data/coco_embeddings")
    shutil.rmtree("data/images")  # captioning reads no images
    width = FeatureStore("data/coco_embeddings").width("image")
    sizes = command_line(CaptioningModule, SIZES | {"embed_dim": width, "learning_rate": 1e-3})
    sizes += ["--data.language_model", gpt2]
    splits = [word for split in ("train", "validation", "test") for word in (f"--data.{split}", captions)]
    cpu = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--trainer.max_epochs", "2")
    fit = ("--config", "configs/mmlg/caption_coco.yaml", *own, *splits, *sizes, *cpu, "--data.global_batch_size", "4")
    ran = run("fit", *fit)
    assert ran.status == 0, ran.err
    (last,) = tmp_path.glob("runs/**/last.ckpt")
    assert list(tmp_path.glob("runs/**/best-step*.ckpt"))
    ran = run("test", "--ckpt_path", str(last))
    assert ran.status == 0, ran.err
    for name in ("bleu_1", "bleu_4", "rouge_l", "cider_d"):
        assert f"test/{name}" in ran.out
    ran = run("predict", "--ckpt_path", str(last), "--data.predict", every)
    assert ran.status == 0, ran.err
    (file,) = tmp_path.rglob("captions.parquet")
    assert pq.read_table(file).num_rows == IMAGES
