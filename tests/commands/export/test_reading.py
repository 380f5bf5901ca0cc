"""`vlightning export --layout vlightning` of each module, and `from_pretrained`, which reads it."""

import json

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from PIL import Image
from transformers import AutoTokenizer

from support.methods.methods import METHODS, OTHERS
from support.methods.published import tiny_clip
from support.runs.command_line import run
from vlightning.commands.export import from_pretrained
from vlightning.common.errors import UserError
from vlightning.lightning_modules.base.model_card import Training

KINDS = METHODS | {name: method for name, method in OTHERS.items() if name != "captioning"}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
TEXTS = ["a red circle above a blue square", "it is green"]


def exported(name, folder):
    """Train a module for a step, export its checkpoint, and return both."""
    method = KINDS[name]
    module, data = method.build(method.prepare(folder), seed=3, batch_size=8, num_workers=0)
    trainer = Trainer(**QUIET, max_steps=1, val_check_interval=1, limit_val_batches=1, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    ran = run("export", folder / "last.ckpt", folder / "my-model", "--layout", "vlightning")
    assert ran.status == 0, ran.err
    return module.eval(), data, folder / "my-model"


@pytest.mark.parametrize("name", KINDS)
def test_an_exported_model_computes_what_the_trained_one_does(name, tmp_path):
    module, data, folder = exported(name, tmp_path)
    model, transform, tokenizer = from_pretrained(folder)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    image = Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 60).convert("RGB")
    if transform is not None:  # the drawn shapes of a classifier are not resized
        own = getattr(data, "eval_transform", None) or data._eval_transform
        torch.testing.assert_close(transform(image), own(image), rtol=0, atol=1e-6)
    state, found = (each.pretrained_state(each.state_dict()) for each in (module, model))
    assert state.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in state.items())
    if tokenizer is not None:
        assert {key: ids.tolist() for key, ids in tokenizer(TEXTS).items()} == {
            key: ids.tolist() for key, ids in data.encoder()(TEXTS).items()
        }
    assert (tokenizer is None) == (name in ("cocord", "classifier"))
    if hasattr(model, "encode_texts"):
        with torch.no_grad():
            texts, images = tokenizer(TEXTS), transform(image)[None]
            torch.testing.assert_close(model.encode_texts(**texts), module.encode_texts(**texts), rtol=0, atol=1e-6)
            expected = module.encode_images(images)[0]
            torch.testing.assert_close(model.encode_images(images)[0], expected, rtol=0, atol=1e-6)


def test_the_model_card_tells_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    _, _, folder = exported("shre", tmp_path)
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "other"
    assert front["tags"] == ["vlightning", "SHReModule"]
    for line in (
        "# my-model",
        "| data | `ShapesDataModule` |",
        "| length | 32 |",
        "| steps | 1 |",
        "| seed | 5 |",
        "both sides resized to 16",
        "model, transform, tokenizer = from_pretrained('my-model')",
        "To be filled in: replace `license`",
    ):
        assert line in card, line
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    found = content["validation_results"]["metrics"]["val/h2/recall_mean"]
    assert f"| val/h2/recall_mean | validation | {found:.4g} |" in card
    assert "| commit | unknown |" in card


def test_the_model_card_reads_the_files_of_the_run(tmp_path):
    metrics = {"test/top1": 12.5, "test/loss": None}
    (tmp_path / "metrics.json").write_text(
        json.dumps({"stage": "test", "metrics": metrics, "chance": {"test/top1": 2.5}})
    )
    (tmp_path / "environment.json").write_text(json.dumps({"git": {"commit": "0a1b2c", "changed": []}}))
    card = (exported("classifier", tmp_path)[2] / "README.md").read_text()
    assert "| commit | 0a1b2c |" in card
    assert "| test/top1 | test | 12.5 | 2.5 |" in card
    assert "| test/loss | test | not finite |  |" in card


def test_the_seed_of_a_run_without_draws_of_its_own_is_that_of_its_config(tmp_path):
    assert Training.of_checkpoint({}, tmp_path).seed is None
    for text, seed in (("seed_everything: 7", 7), ("seed_everything: true", None), ("- [", None)):
        (tmp_path / "config.yaml").write_text(text)
        assert Training.of_checkpoint({}, tmp_path).seed == seed
    states = {"StepSeedCallback": {"seed": 3}}
    (tmp_path / "config.yaml").write_text("seed_everything: 7")
    assert Training.of_checkpoint({"callbacks": states}, tmp_path).seed == 3


def test_a_model_card_names_no_folder_of_the_machine(tmp_path):
    data = {"_class_path": "x.ImageTextDataModule", "train": ["/home/me/secret/own.csv", "s3://open/pairs.tar"]}
    tiny_clip().save_pretrained(tmp_path / "out", training=Training(data))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| train | own.csv, s3://open/pairs.tar |" in card
    assert "secret" not in card


def test_transformers_reads_clips_tokenizer_from_the_folder(tmp_path):
    _, data, folder = exported("clip", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = data.encoder()(TEXTS)["input_ids"]
    found = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
    assert found.shape == own.shape
    ends = own.argmax(1).tolist()
    assert [row[: end + 1].tolist() for row, end in zip(found, ends, strict=True)] == [
        row[: end + 1].tolist() for row, end in zip(own, ends, strict=True)
    ]


def test_what_is_no_export_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"Expected the folder of an export, got './gone', which does not exist"):
        from_pretrained("./gone")
    with pytest.raises(UserError, match=r"without config.json and without model.safetensors"):
        from_pretrained(tmp_path)
    tiny_clip().save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"class": "CLIPModul"}))
    with pytest.raises(UserError, match=r"got one of 'CLIPModul': did you mean 'CLIPModule'\?"):
        from_pretrained(tmp_path / "out")
