"""A training that reads features of locked towers from a store: its losses, its resume, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from support.data.colors import read_table, write_colors, write_table
from support.methods.published import LENGTH, write_published
from support.runs.command_line import run
from support.runs.stored import Encodings, fit_with_losses
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Preprocessing
from vlightning.datamodules import ImageTextDataModule
from vlightning.datamodules.reading.resolve import Source
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules import CLIPModule
from vlightning.lightning_modules.core.memory import MemorySettings
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.shapes import OpenClipConfig

EPOCHS, SEED = 3, 5
TIMM = OpenClipConfig(
    "timm",
    {
        "embed_dim": 16,
        "vision_cfg": {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160},
        "text_cfg": {"context_length": LENGTH, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    },
)
SQUARE = Preprocessing(160, (0.5,) * 3, (0.5,) * 3, "bicubic")
LIT, TEXT = {"lock_image": "all"}, {"lock_text": "all"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = write_colors(tmp_path_factory.mktemp("stored"))
    embed(folder, folder / "views", f"--views={EPOCHS}", f"--seed={SEED}")
    embed(folder, folder / "plain")
    return folder


def embed(files, store, *more, tables=("pairs.csv",)):
    sources = json.dumps([f"{files}/{table}" for table in tables])
    ran = run(
        *("embed", f"local-dir:{files}/model", f"--data.train={sources}", f"--output={store}"),
        *("--shard_size=10", "--batch_size=16", "--num_workers=0", "--accelerator=cpu", *more),
    )
    assert ran.status == 0, ran.err


def data_of(files, store=None, **options):
    given = {"train": f"{files}/pairs.csv", "tokenizer": "clip", "vocab_size": 49408, "max_tokens": LENGTH}
    given |= {"batch_size": 8, "num_workers": 0, "store": store and str(store)}
    return ImageTextDataModule(**given | options)


def trained(files, tuning, store=None, steps=-1, resumed=None, memory=None, more=(), **options):
    """Fit, and return the losses, the module and the Trainer."""
    seed_everything(SEED, verbose=False)
    module = CLIPModule(
        weights=f"{files}/model",
        max_tokens=LENGTH,
        tuning=tuning,
        optim={"learning_rate": 1e-3},
        memory=memory or MemorySettings(),
    )
    kept, trainer = fit_with_losses(module, data_of(files, store, **options), EPOCHS, more, resumed, steps)
    return kept, module, trainer


@pytest.mark.parametrize("tuning", [LIT, TEXT], ids=["image", "text"])
@pytest.mark.parametrize("memory", [None, MemorySettings(micro_batch_size=3)], ids=["whole", "slices"])
def test_losses_are_those_of_the_same_views_without_a_store(files, tuning, memory):
    plain, uncached, _ = trained(files, tuning, memory=memory)
    cached, module, _ = trained(files, tuning, files / "views", memory=memory)
    assert len(plain.losses) == EPOCHS * 4
    assert cached.samples == plain.samples
    assert cached.losses == pytest.approx(plain.losses, abs=1e-5)
    for one, other in zip(moved(uncached), moved(module), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def moved(module):
    """Parameters without the biases of keys: these change no attention, and AdamW makes steps of their noise."""
    for name, parameter in module.named_parameters():
        if name.endswith(("in_proj_bias", "qkv.bias")):
            queries, _, values = parameter.chunk(3)
            yield from (queries, values)
        else:
            yield parameter


@pytest.mark.parametrize(("tuning", "running"), [(LIT, {"text"}), (TEXT, {"image"})])
def test_a_locked_tower_does_not_run_in_training(files, tuning, running):
    watch = Encodings()
    trained(files, tuning, files / "plain", steps=2, more=[watch])
    assert watch.ran == running


def test_with_both_towers_locked_only_a_projection_runs(tmp_path):
    """The features of the image tower are those before its projection, the last layer, which trains."""
    files = write_colors(tmp_path)
    shutil.rmtree(files / "model")
    torch.manual_seed(0)
    save_open_clip(build_model(TIMM, context_length=LENGTH), TIMM, SQUARE, files / "model")
    tuning = {"lock_image": 6, "lock_text": "all"}
    config = ["--model=CLIPModule", f"--model.weights={files}/model", f"--model.tuning={json.dumps(tuning)}"]
    config += ["--data=ImageTextDataModule", f"--data.train={files}/pairs.csv", "--data.tokenizer=clip"]
    config += ["--data.vocab_size=49408", f"--data.max_tokens={LENGTH}", f"--model.max_tokens={LENGTH}"]
    words = [f"--output={files}/store", f"--views={EPOCHS}", f"--seed={SEED}", "--num_workers=0", "--accelerator=cpu"]
    ran = run("embed", *config, *words)
    assert ran.status == 0, ran.err
    store = FeatureStore(files / "store")
    assert store.width("image") == 64  # of the tower; its projection has 16
    assert not store.sides["image"]["projected"]
    assert store.sides["text"]["projected"]
    watch = Encodings()
    plain, uncached, _ = trained(files, tuning)
    cached, module, _ = trained(files, tuning, files / "store", more=[watch])
    assert watch.ran == set()
    assert cached.samples == plain.samples
    assert cached.losses == pytest.approx(plain.losses, abs=1e-5)
    changed = uncached.student.visual.head.proj.weight
    torch.testing.assert_close(module.student.visual.head.proj.weight, changed, atol=1e-5, rtol=1e-4)
    embedded = run("embed", f"local-dir:{files}/model", f"--data.train={files}/pairs.csv", f"--output={files}/whole")
    assert embedded.status == 0, embedded.err
    with pytest.raises(UserError, match="by other weights or behind another layer"):
        trained(files, tuning, files / "whole")
    sentence = run("search", f"{files}/store", "dark", f"--model=local-dir:{files}/model").sentence
    assert "got features before the projection of a training" in sentence


def test_images_need_not_exist_and_a_resumed_run_is_the_uninterrupted_one(files, tmp_path):
    for name in ("model", "views"):
        shutil.copytree(files / name, tmp_path / name)
    shutil.copy(files / "pairs.csv", tmp_path / "pairs.csv")  # without images
    moved = tmp_path / "images"
    moved.mkdir()
    (moved / "31.png").write_bytes((files / "images/31.png").read_bytes())  # one of those that are tried
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)  # in the middle of an epoch
    whole, module, _ = trained(tmp_path, LIT, tmp_path / "views", more=[save])
    rest, again, _ = trained(tmp_path, LIT, tmp_path / "views", resumed=str(tmp_path / "step=6.ckpt"))
    assert whole.samples[6:] == rest.samples
    assert whole.losses[6:] == rest.losses
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    shutil.rmtree(tmp_path / "views")  # evaluation does not read it
    data = data_of(tmp_path, tmp_path / "views", validation=f"{files}/held_out.csv")
    (metrics,) = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(again, datamodule=data)
    assert "val/recall_mean" in metrics


def test_weights_of_sources_bad_rows_and_captions_as_rows(files, tmp_path):
    rows = [(f"{files}/{name}", caption) for name, caption in read_table(files / "pairs.csv")]
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows[3] = (str(tmp_path / "broken.png"), rows[3][1])
    write_table(tmp_path / "one.csv", rows[:20])
    write_table(tmp_path / "two.csv", rows[20:])
    shutil.copytree(files / "model", tmp_path / "model")
    sources = [f"{tmp_path}/one.csv", f"{tmp_path}/two.csv"]
    views = [f"--views={EPOCHS}", f"--seed={SEED}"]
    embed(tmp_path, tmp_path / "store", *views, tables=("one.csv", "two.csv"))
    once = {"train": sources, "max_bad_share": 0.2}
    plain, _, _ = trained(tmp_path, LIT, **once)
    cached, _, _ = trained(tmp_path, LIT, tmp_path / "store", **once)
    assert cached.samples == plain.samples
    assert all(3 not in samples for samples in cached.samples)
    assert cached.losses == pytest.approx(plain.losses, abs=1e-5)
    weighted = {"train": [Source(sources[0], weight=2), Source(sources[1], weight=0.5)], "max_bad_share": 0.2}
    plain, _, _ = trained(tmp_path, LIT, **weighted)
    cached, _, _ = trained(tmp_path, LIT, tmp_path / "store", **weighted)
    assert cached.samples == plain.samples
    captions, _, _ = trained(tmp_path, LIT, tmp_path / "store", samples="captions", **once)
    assert len(captions.losses) == EPOCHS * 4


def fit(files, *words):
    given = {
        "model": "CLIPModule",
        "model.weights": f"{files}/model",
        "model.max_tokens": LENGTH,
        "data": "ImageTextDataModule",
        "data.train": f"{files}/pairs.csv",
        "data.tokenizer": "clip",
        "data.vocab_size": 49408,
        "data.max_tokens": LENGTH,
        "data.batch_size": 8,
        "data.num_workers": 0,
        "data.store": f"{files}/views",
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 2,
        "trainer.logger": "false",
    }
    names = {word.split("=")[0].removeprefix("--") for word in words}
    options = [f"--{name}={value}" for name, value in given.items() if name not in names]
    return run("fit", *[word for word in options if word.startswith(("--model", "--data", "--trainer"))], *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model.tuning.lock_image=2"], "got none locked: set model.tuning.lock_image all"),
        (["--data.augmentation=crop"], "Expected images augmented as for the store"),
        (["--data.image_size=16", "--model.vision.image_size=16"], "Expected images augmented as for the store"),
        (["--data.clean_captions=true"], None),
        (["--data.store=nowhere"], "got no manifest of one"),
        (["--data.streaming=true", "--data.samples_per_epoch=32"], "Expected rows in random access with data.store"),
    ],
)
def test_a_store_that_does_not_fit_is_refused_in_a_sentence(files, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    lock = [] if any("lock_image" in word for word in words) else ["--model.tuning.lock_image=all"]
    ran = fit(files, *lock, *words)
    if sentence is None:  # texts that are not read from the store may be prepared in another way
        assert ran.status == 0, ran.err
    else:
        assert sentence in ran.sentence


def test_other_weights_rows_texts_and_files_are_refused_in_a_sentence(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lit = "--model.tuning.lock_image=all"
    other = write_published(tmp_path / "other", seed=8)
    assert "Expected a store of this image tower" in fit(files, lit, f"--model.weights={other}").sentence
    rows = [(f"{files}/{name}", caption) for name, caption in read_table(files / "pairs.csv")]
    write_table(tmp_path / "more.csv", [*rows, rows[0]])
    sentence = fit(files, lit, f"--data.train={tmp_path}/more.csv").sentence
    assert f"Expected a store of the 33 rows of data.train, got the store '{files}/views' of 32" in sentence
    write_table(tmp_path / "turned.csv", rows[::-1])
    assert "got another image in row 0" in fit(files, lit, f"--data.train={tmp_path}/turned.csv").sentence
    text = "--model.tuning.lock_text=all"
    assert "another tokenizer, length or cleaning" in fit(files, text, "--data.clean_captions=true").sentence
    changed = [(name, f"a {caption}") for name, caption in rows]
    write_table(tmp_path / "changed.csv", changed)
    assert "caption not in the store: " in fit(files, text, f"--data.train={tmp_path}/changed.csv").sentence
    shutil.copytree(files / "views", tmp_path / "damaged")
    (tmp_path / "damaged/00000001.arrow").write_bytes(b"nothing")
    assert "Expected a shard of the store in" in fit(files, lit, f"--data.store={tmp_path}/damaged").sentence
    manifest = json.loads((tmp_path / "damaged/manifest.json").read_text())
    Path(tmp_path / "damaged/manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    assert "one whose writing was stopped" in fit(files, lit, f"--data.store={tmp_path}/damaged").sentence
