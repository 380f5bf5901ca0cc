"""Embeddings are the tower's features of images with its preprocessing, and captioning trains on them."""

import json
import shutil

import open_clip
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from support.data.images import draw_image
from support.methods.captioning import CAPTIONS, SIZES, write_language_model
from support.methods.clip import SIZE, add_tiny_clip, randomized
from support.methods.groups import command_line
from support.methods.mmlg import trained_checkpoint
from support.methods.tiny_modules import trainer
from support.runs.command_line import run
from vlightning.callbacks import ImageEmbeddingWriter
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import CaptioningModule, ImageEmbeddingModule
from vlightning.lightning_modules.mmlg.embedding import load_image_tower

IMAGES = len(CAPTIONS)
PREPROCESSING = {"image_mean": (0.5, 0.4, 0.3), "image_std": (0.2, 0.3, 0.4)}


@pytest.fixture(scope="module")
def clip():
    return randomized(open_clip.create_model(add_tiny_clip()))


@pytest.fixture
def weights(tmp_path, clip):
    save_file(clip.state_dict(), tmp_path / "clip.safetensors")
    return str(tmp_path / "clip.safetensors")


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


def data_of(folder, **options):
    every = {"path": write_images(folder), "split": "train+restval+val+test"}
    text = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": 77, "cache_dir": str(folder / "cache")}
    return ImageTextDataModule(predict=every, batch_size=4, num_workers=0, **text, **options)


def test_embeddings_equal_open_clips_unnormalized_features(tmp_path, clip, weights):
    module = ImageEmbeddingModule(weights, add_tiny_clip())
    data = data_of(tmp_path / "data", image_size=48)  # ignored: the tower has its own
    trainer(ImageEmbeddingWriter(str(tmp_path / "out"))).predict(module, data)
    table = pq.read_table(tmp_path / "out" / "embeddings.parquet")
    prepare = open_clip.image_transform(SIZE, False)
    with torch.no_grad():
        expected = clip.encode_image(torch.stack([prepare(draw_image(number)) for number in range(IMAGES)]))
    found = torch.tensor(table["embedding"].to_pylist())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found.norm(dim=1) - 1).abs().min() > 0.1
    assert table["image_id"].to_pylist() == list(range(100, 106))
    assert table["image"].to_pylist() == [str(tmp_path / f"data/images/{number}.png") for number in range(IMAGES)]
    origin = json.loads(table.schema.metadata[b"tower"])
    assert origin["model"] == add_tiny_clip()
    assert origin["sha256"] == load_image_tower(add_tiny_clip(), weights).origin["sha256"]
    assert not module.tower.state_dict()


def test_a_datamodule_without_images_is_refused(weights):
    module = ImageEmbeddingModule(weights, add_tiny_clip())
    with pytest.raises(UserError, match="with an eval_transform, got NoneType"):
        trainer().predict(module, torch.zeros(2, 3))


@pytest.mark.parametrize(
    "options", [{"student": "plain", "depth": 3}, {"student": "MM-LG"}], ids=["a descendant", "an auxiliary"]
)
def test_the_tower_of_a_training_is_read_from_its_checkpoint(tmp_path, options):
    module, path = trained_checkpoint(tmp_path, **options, **PREPROCESSING)
    tower = load_image_tower(None, path)
    image = torch.randn(3, 3, SIZE, SIZE)
    with torch.no_grad():
        expected = module.student.encode_image(image)
        torch.testing.assert_close(tower.network.network(image), expected, rtol=1e-5, atol=1e-5)
    found = tower.preprocessing
    assert (found.image_size, found.mean, found.std, found.interpolation) == (SIZE, *PREPROCESSING.values(), "bicubic")
    assert tower.origin["sha256"] == tower.network.fingerprint()


def test_sources_without_an_image_tower_are_refused(tmp_path):
    content = {"state_dict": {}, "hyper_parameters": {"width": 8}, "pytorch-lightning_version": "2.6.6"}
    torch.save(content | {"epoch": 0, "global_step": 0}, tmp_path / "run.ckpt")
    with pytest.raises(
        UserError, match=r"Expected arguments of MMLGModule in the checkpoint '.*run\.ckpt', got 'width'"
    ):
        load_image_tower(None, str(tmp_path / "run.ckpt"))
    with pytest.raises(UserError, match=r"found none at 'nothing\.ckpt'"):
        load_image_tower(None, "nothing.ckpt")
    with pytest.raises(UserError, match="Expected the name of the model of the weights"):
        load_image_tower(None, "openai")


def test_the_command_line_embeds_trains_tests_and_predicts(tmp_path, monkeypatch, weights):
    monkeypatch.chdir(tmp_path)
    captions = write_images(tmp_path / "data")
    gpt2 = write_language_model("gpt2", steps=100)
    own = ("--data.image_root", "data", "--data.cache_dir", "cache", "--data.num_workers", "0")
    every = json.dumps({"path": captions, "split": "train+restval+val+test"})
    embed = ("--model.weights", weights, "--model.model", add_tiny_clip(), "--data.predict", every, *own)
    ran = run("predict", "--config", "configs/mmlg/caption_embed.yaml", *embed)
    assert ran.status == 0, ran.err
    shutil.rmtree("data/images")  # captioning reads no images
    sizes = command_line(CaptioningModule, SIZES | {"embed_dim": 8, "learning_rate": 1e-3})
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
