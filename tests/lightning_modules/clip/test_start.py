"""Published weights: folders, files and tags, the loss of the start, and what does not fit."""

import math

import lightning.pytorch as pl
import open_clip
import pytest
import torch

from support.methods.published import CONFIG, LENGTH, PREPROCESSING, SIZE, WORDS, pairs, tiny_clip, write_published
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import CLIPModule
from vlightning.lightning_modules.clip import start
from vlightning.lightning_modules.clip.module import SIGLIP_BIAS, SIGLIP_SCALE
from vlightning.lightning_modules.networks.clip.shapes import OpenClipConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_published(tmp_path_factory.mktemp("published") / "model")


def theirs(folder, batch):
    model = open_clip.create_model(f"local-dir:{folder}").double().eval()
    return model.encode_image(batch["image"], normalize=True), model.encode_text(batch["input_ids"], normalize=True)


@pytest.mark.parametrize("form", ["{}", "local-dir:{}", "{}/open_clip_model.safetensors"])
@pytest.mark.parametrize("tuning", [{}, {"lora": {"rank": 2}}])
def test_a_run_starts_with_the_features_of_the_published_model(form, tuning, folder):
    model = {"model": CONFIG} if form.endswith("safetensors") else {}
    module = tiny_clip(weights=form.format(folder), tuning=tuning, **model)
    module.load_initial_weights()
    batch = pairs(5)
    with torch.no_grad():
        for found, expected in zip(module.double().eval()(batch), theirs(folder, batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    record = module.expected_preprocessing()
    assert (tuple(record["mean"]), record["interpolation"]) == (PREPROCESSING.mean, "bicubic")
    assert record["image_size"] == SIZE


def test_a_checkpoint_needs_no_other_file(folder, tmp_path):
    module = tiny_clip(weights=folder)
    module.load_initial_weights()
    again = CLIPModule(**module.hparams | {"weights": str(tmp_path / "gone")})
    again.load_state_dict(module.state_dict())
    assert again.hparams["model"]["name"] == "model"


def test_positions_are_resampled_for_larger_images(folder):
    module = tiny_clip(weights=folder, vision={"image_size": 64})
    module.load_initial_weights()
    assert module.student.visual.positional_embedding.shape == (17, 32)
    assert module.data_sizes().image_size == 64


@pytest.mark.parametrize(
    ("model", "tag", "found"),
    [
        ("ViT-B-32", "openai", "ViT-B-32-quickgelu"),
        ("ViT-B-32-quickgelu", "openai", "ViT-B-32-quickgelu"),
        ("ViT-B-32", "laion2b_s34b_b79k", "ViT-B-32"),
        ("MobileCLIP-S0", "mobileclip_s0.pt", "MobileCLIP-S0"),
    ],
)
def test_a_tag_selects_the_activation_that_it_was_trained_with(model, tag, found):
    assert str(start.model_of(model, tag)) == found


def test_a_tag_is_loaded_by_open_clip(folder, monkeypatch):
    published = start.load_published(None, folder)
    asked = []
    monkeypatch.setattr(start, "load_published", lambda *given: asked.append(given) or published)
    module = tiny_clip(model=CONFIG, weights="laion2b_s34b_b79k")
    module.given = "ViT-B-32"
    module.load_initial_weights()
    assert asked == [("ViT-B-32", "laion2b_s34b_b79k")]
    batch = pairs(3)
    with torch.no_grad():
        for ours, expected in zip(module.double().eval()(batch), theirs(folder, batch), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


def test_weights_without_a_bias_start_siglips_loss_with_its_scale_and_bias(folder):
    module = tiny_clip(weights=folder, loss={"name": "sigmoid"})
    module.load_initial_weights()
    assert module.student.logit_scale.exp().item() == pytest.approx(SIGLIP_SCALE)
    assert module.student.logit_bias.item() == SIGLIP_BIAS
    loss = module.double().training_step(pairs(4), 0)["loss"]
    with torch.no_grad():
        image, text = module(pairs(4))
        logits = SIGLIP_SCALE * image @ text.T + SIGLIP_BIAS
        signs = 2 * torch.eye(4) - 1
        expected = -torch.nn.functional.logsigmoid(signs * logits).sum() / 4
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)


def test_the_logged_share_is_the_loss_over_the_logarithm_of_the_batch(folder):
    module, logged = tiny_clip(weights=folder).double(), {}
    module.log = lambda name, value, **_: logged.__setitem__(name, float(value))
    batch = pairs(4)
    batch["input_ids"][1] = batch["input_ids"][0]
    found = module.training_step(batch, 0)
    assert logged["train/loss_share"] == found["loss_share"] == pytest.approx(found["loss"].item() / math.log(4))
    assert (logged["train/repeated_images"], logged["train/repeated_texts"]) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": None}, "Expected the name of the model as model.model, got none"),
        ({"model": None, "weights": "local-dir:nowhere"}, "Expected a folder with an open_clip_config.json"),
        ({"model": "ViT-B-33"}, "Expected one of MobileCLIP's or open_clip's models, got 'ViT-B-33'"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        CLIPModule(**options)


def test_a_model_with_a_tokenizer_of_the_hub_refuses_clips():
    assert start.needed_tokenizer("ViT-B-16-SigLIP") == "timm/ViT-B-16-SigLIP"
    assert start.needed_tokenizer("ViT-B-32") is None
    text = CONFIG.config["text_cfg"] | {"hf_tokenizer_name": "hub/words"}
    module = tiny_clip(model=OpenClipConfig("other", CONFIG.config | {"text_cfg": text}))
    data = ShapesDataModule(
        tokenizer="clip", vocab_size=WORDS, max_tokens=LENGTH, image_size=SIZE, length=8, batch_size=4, num_workers=0
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with pytest.raises(UserError, match="Expected the tokenizer hub/words of other, got CLIP's"):
        pl.Trainer(max_steps=1, accelerator="cpu", enable_model_summary=False, **quiet).fit(module, data)
