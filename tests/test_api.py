"""`import vlightning as vl`: a few lines that train, embed, search, save and load; each is a thin layer."""

import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback
from PIL import Image

import vlightning as vl
from support.data.colors import read_table, write_colors
from support.methods.published import LENGTH
from vlightning.api import _config
from vlightning.commands.evaluate.model import load_model
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import CLIPModule

QUICK = {"max_steps": 2, "accelerator": "cpu", "enable_progress_bar": False, "num_workers": 0, "batch_size": 8}
TINY = {
    "model": {"image_tower": "fastvit_mci_tiny", "image_size": 64, "embed_dim": 16, "width": 64, "layers": 1},
    "image_size": 64,
}


class Steps(Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, *_):
        self.count += 1


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("colors"))


@pytest.fixture(scope="module")
def pairs(colors):
    return [(Image.open(colors / name), text) for name, text in read_table(colors / "pairs.csv")]


@pytest.fixture(scope="module")
def model(pairs):
    return vl.fit(pairs, "clip-small", **TINY, **{**QUICK, "max_steps": -1, "max_epochs": 1})


def test_the_import_is_light():
    code = "import sys, vlightning; print([name for name in ('torch', 'lightning', 'PIL') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(vl.__all__) <= set(dir(vl))


def test_a_fit_of_pairs_embeds_searches_saves_and_loads(model, colors, pairs, tmp_path):
    assert isinstance(model.module, CLIPModule)
    assert model.trainer.global_step >= 3
    assert "val/recall_mean" in model.metrics  # a tenth of the rows
    parameters = sum(weight.numel() for weight in model.module.parameters())
    assert repr(model).startswith(f"Model(CLIPModule, {parameters:,} parameters, val/")
    assert f"val/recall_mean {model.metrics['val/recall_mean']:.4g}" in repr(model)
    rows = model.trainer.datamodule.opened_rows
    assert len(rows("train")) + len(rows("validation")) == 32
    assert 1 <= len(rows("validation")) <= 8
    images = model.embed([image for image, _ in pairs[:3]])
    texts = model.embed([text for _, text in pairs[:3]])
    assert images.shape == texts.shape == (3, 16)
    assert torch.allclose(images.norm(dim=1), torch.ones(3), atol=1e-5)
    files = [str(colors / name) for name, _ in read_table(colors / "pairs.csv")[:3]]
    assert torch.allclose(model.embed(files), images, atol=1e-5)
    assert torch.allclose(model.embed(pairs[0][1]), texts[:1], atol=1e-5)
    model.save(tmp_path / "x")
    loaded = vl.load(tmp_path / "x")
    assert torch.allclose(loaded.embed([image for image, _ in pairs[:3]]), images, atol=1e-5)
    assert torch.allclose(loaded.embed([text for _, text in pairs[:3]]), texts, atol=1e-5)
    words = {"count": 3, "captions": f"{colors}/pairs.csv", "cache": str(tmp_path / "cache")}
    best = loaded.search(colors / "images", "full dark dark", **words)
    cosines = loaded.embed(sorted(map(str, (colors / "images").iterdir()))) @ loaded.embed("full dark dark")[0]
    assert [each.cosine for each in best] == pytest.approx(cosines.topk(3).values.tolist(), abs=1e-5)
    titles = {name.removeprefix("images/"): text for name, text in read_table(colors / "pairs.csv")}
    assert [each.title for each in best] == [titles.get(each.name, "") for each in best]
    found = loaded.search(colors / "images", pairs[4][0], **words)
    assert found[0].cosine == pytest.approx(1, abs=1e-4)


def test_what_it_saves_is_an_export_of_the_commands(model, pairs, tmp_path):
    model.save(tmp_path / "x")
    other = load_model(str(tmp_path / "x"))
    assert torch.allclose(other.encode_texts([pairs[0][1]]), model.embed(pairs[0][1]), atol=1e-5)


def test_keywords_reach_the_method_the_data_and_the_trainer(colors):
    steps = Steps()
    options = {
        **QUICK,
        "max_steps": 3,
        "callbacks": [steps],
        "optim": {"learning_rate": 0.0125},
        "clean_captions": False,
    }
    model = vl.fit(str(colors / "pairs.csv"), **TINY, **options, split="0.5/0.5")
    assert steps.count == model.trainer.global_step == 3
    assert model.module.optim.learning_rate == 0.0125
    assert model.module.optim.weight_decay == 0.1
    data = model.trainer.datamodule
    assert data.clean_captions is False
    assert 12 <= len(data.opened_rows("validation")) <= 20


def test_sizes_of_the_data_reach_the_groups_of_settings_of_the_method(pairs):
    given = TINY | {"image_size": 48}
    model = vl.fit(pairs, "clip-small", **given, **QUICK | {"max_steps": 1})
    assert model.module.vision.image_size == model.trainer.datamodule.hparams["image_size"] == 48
    with pytest.raises(UserError, match=r"Expected the same image_size .* got vision.image_size=32 and image_size=48"):
        vl.fit(pairs, "clip-small", **given, vision={"image_size": 32}, **QUICK | {"max_steps": 1})


def test_a_config_changes_those_that_it_needs(tmp_path):
    lora = _config("clip-lora")
    assert lora["model"]["class_path"] == "CLIPModule"
    assert lora["model"]["init_args"]["tuning"]["lora"]
    assert "needs" not in lora
    (tmp_path / "a.yaml").write_text("model: {class_path: CLIPModule, init_args: {model: x, max_tokens: 8}}")
    (tmp_path / "b.yaml").write_text("needs: a.yaml\nmodel: {init_args: {max_tokens: 9}}")
    (tmp_path / "c.yaml").write_text("needs: [a.yaml, b.yaml]\nseed_everything: 3")
    arguments = {"model": "x", "max_tokens": 9}
    assert _config(f"{tmp_path}/c.yaml") == {
        "model": {"class_path": "CLIPModule", "init_args": arguments},
        "seed_everything": 3,
    }


def test_a_published_model_starts_a_fine_tuning_in_full_or_with_adapters(colors, pairs):
    before = load_model(f"local-dir:{colors}/model").encode_texts(["dark"])
    options = {**QUICK, "max_steps": 1, "max_tokens": LENGTH, "callbacks": []}
    full = vl.fit(pairs, start=f"{colors}/model", optim={"learning_rate": 1e-3}, **options)
    assert full.module.weights == f"{colors}/model"
    assert not torch.allclose(full.embed("dark"), before)
    pytest.importorskip("peft")
    adapted = vl.fit(pairs, start=f"{colors}/model", lora=True, **options)
    assert adapted.module.tuning.lora.rank == 16
    loaded = vl.load(f"local-dir:{colors}/model")
    assert torch.allclose(loaded.embed("dark"), before)


def test_a_datamodule_and_a_method_are_taken_as_they_are(colors):
    data = ImageTextDataModule(
        train=str(colors / "pairs.csv"),
        tokenizer="clip",
        vocab_size=49408,
        max_tokens=8,
        image_size=64,
        batch_size=8,
        num_workers=0,
    )
    module = CLIPModule(TINY["model"], max_tokens=8)
    model = vl.fit(data, module, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    assert model.module is module
    assert model.trainer.datamodule is data


def test_a_small_classifier_learns_from_a_large_one(tmp_path):
    images = [
        (Image.new("RGB", (32, 32), (50 * (number % 4), number, 90)), f"class {number % 4}") for number in range(24)
    ]
    options = {**QUICK, "max_steps": 1}
    teacher = vl.fit(images, _teacher(tmp_path), **options)
    teacher.trainer.save_checkpoint(tmp_path / "teacher.ckpt")
    student = vl.distill(images, teacher=str(tmp_path / "teacher.ckpt"), student="resnet8", **options)
    assert student.module.num_classes == 4
    assert student.module.teacher_settings.name == "resnet14"
    assert student.predict([image for image, _ in images[:5]]).sum(1).tolist() == pytest.approx([1] * 5)
    teacher.save(tmp_path / "teacher")
    again = vl.distill(images, teacher=str(tmp_path / "teacher"), student="resnet8", **options)
    assert again.module.teacher_settings.name == "resnet14"
    for name, tensor in student.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    student.save(tmp_path / "x")
    assert torch.allclose(vl.load(tmp_path / "x").predict(images[0][0]), student.predict(images[0][0]), atol=1e-5)
    with pytest.raises(UserError, match="Expected a model of images and texts, got CoCoRDModule: use `predict`"):
        student.embed("a text")


def _teacher(folder):
    file = folder / "teacher.yaml"
    file.write_text(
        "model:\n  class_path: CoCoRDModule\n  init_args:\n    student: resnet14\n    contrast: {weight: 0}\n"
        "    prediction: {weight: 0}\n"  # the datamodule follows from the method
    )
    return str(file)


def refused(call, sentence):
    with pytest.raises(UserError) as raised:
        call()
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_a_mistake_is_one_sentence(model, pairs, colors, tmp_path):
    refused(lambda: vl.fit(pairs, "clip-smal"), "Expected a config as METHOD-NAME, such as clip-small, a YAML file or")
    refused(lambda: vl.fit(pairs, "gone.yaml"), "Expected a YAML file of a config, got 'gone.yaml'")
    refused(lambda: vl.fit(pairs, max_epoch=1), "Expected an option of CLIPModule, ImageTextDataModule or the Trainer")
    refused(lambda: vl.fit(pairs, start="ViT-B-32"), "Expected `start` as NAME/TAG, such as ViT-B-32/openai")
    refused(lambda: vl.fit(pairs, "clip-small", start="a/b"), "Expected a model to train or `start` to fine-tune")
    refused(lambda: vl.fit(pairs, lora=True), "Expected `start` with lora=True")
    refused(lambda: vl.load(tmp_path / "gone"), "Expected an existing checkpoint or export")
    refused(lambda: model.embed([]), "Expected images or texts to embed, got an empty list")
    refused(lambda: model.embed([pairs[0][0], "a text"]), "Expected images alone or texts alone to embed, got the text")
    refused(lambda: model.embed("gone.png"), "Expected images to embed, got gone.png (missing file)")
    refused(lambda: model.embed([object()]), "Expected an image or a text, got object in place of an image")
    refused(lambda: model.search(tmp_path / "gone", "a"), "Expected a folder of images after the model, got")
    refused(lambda: model.search(colors / "images", "a", count=0), "Expected a count of at least 1, got 0")
    refused(lambda: model.predict(pairs[0][0]), "Expected a classifier to predict classes, got another model")
    refused(
        lambda: vl.load(f"local-dir:{colors}/model").save(tmp_path / "y"), "Expected a model of this package to save"
    )
