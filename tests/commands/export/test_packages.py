"""Exports that an application takes as they are: Immich, Core ML, ExecuTorch, and weights in half precision."""

import json
import os

import numpy as np
import onnxruntime
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity, normalize, pad

from support.methods.classifier import tiny_classifier
from support.methods.methods import METHODS, OTHERS
from support.runs.command_line import run
from vlightning.commands.export import from_pretrained
from vlightning.commands.export.publishing import files_of
from vlightning.lightning_modules.core.programs import example_images

KINDS = METHODS | OTHERS
CONVERTERS_VARIABLE = "VLIGHTNING_TEST_CONVERTERS"
"""If it is 1, the environments of the converters are made, some hundred megabytes; `.ci/run` sets it."""
TEXTS = ["a red circle above a blue square", "it  is green"]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def image():
    return Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 60).convert("RGB")


def trained(name, folder):
    """Train for a step, and return the module in eval mode and its data; the checkpoint is `last.ckpt`."""
    module, data = KINDS[name].build(KINDS[name].prepare(folder), seed=3, batch_size=8, num_workers=0)
    trainer = Trainer(**QUIET, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.eval(), data


def export(folder, target, *words):
    ran = run("export", folder / "last.ckpt", folder / target, *words)
    assert ran.status == 0, ran.err
    made = folder / target
    assert set(files_of(made)) == {file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file()}
    return made, ran.out


def as_immich_does(folder, pil_image, text):
    """The embeddings of an image and a text, read from a folder by the rules of Immich's machine learning."""
    how = json.loads((folder / "visual/preprocess_cfg.json").read_text())
    side = how["size"][0]
    resampling = Image.Resampling[how["interpolation"].upper()]
    if how["resize_mode"] == "squash":
        pil_image = pil_image.resize((side, side), resampling)
    else:
        width, height = pil_image.size
        shorter = min(width, height)
        pil_image = pil_image.resize((width * side // shorter, height * side // shorter), resampling)
        left, upper = (pil_image.width - side) // 2, (pil_image.height - side) // 2
        pil_image = pil_image.crop((left, upper, left + side, upper + side))
    pixels = (np.asarray(pil_image, np.float32) / 255 - how["mean"]) / how["std"]
    visual = onnxruntime.InferenceSession(folder / "visual/model.onnx")
    (found,) = visual.run(None, {"image": pixels.transpose(2, 0, 1)[None].astype(np.float32)})
    context = json.loads((folder / "config.json").read_text())["text_cfg"]["context_length"]
    tokenizer = Tokenizer.from_file(str(folder / "textual/tokenizer.json"))
    padding = json.loads((folder / "textual/tokenizer_config.json").read_text())["pad_token"]
    tokenizer.enable_padding(length=context, pad_token=padding, pad_id=tokenizer.token_to_id(padding))
    tokenizer.enable_truncation(context)
    ids = np.array([tokenizer.encode(" ".join(text.split())).ids], np.int32)
    (words,) = onnxruntime.InferenceSession(folder / "textual/model.onnx").run(None, {"text": ids})
    return torch.from_numpy(found[0]), torch.from_numpy(words[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "albef"])
@torch.no_grad()
def test_immich_reads_a_model_whose_embeddings_are_filled_up_to_a_dimension_that_it_knows(name, tmp_path):
    with torch.enable_grad():
        module, data = trained(name, tmp_path)
    folder, _ = export(tmp_path, "made", "--layout", "immich")
    pixels = data.eval_transform(image())
    for text in TEXTS:
        found, words = as_immich_does(folder, image(), text)
        assert found.shape == words.shape == (512,)
        assert json.loads((folder / "config.json").read_text())["embed_dim"] == 512
        own = normalize(module.encode_texts(**data.encoder()([text])), dim=-1)
        torch.testing.assert_close(words, pad(own, (0, 512 - own.shape[-1]))[0], rtol=0, atol=1e-5)
        seen = normalize(module.encode_images(pixels[None])[0], dim=-1)
        assert cosine_similarity(found[None, : seen.shape[-1]], seen) > 0.999  # Pillow's resize of another size first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@torch.no_grad()
def test_the_error_of_half_precision_is_printed_and_is_that_of_the_written_weights(kind, tmp_path):
    with torch.enable_grad():
        module, data = trained("clip", tmp_path)
    folder, said = export(tmp_path, "half", "--layout", "vlightning", "--dtype", kind)
    dtype = getattr(torch, kind)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()} == {dtype}
    half, *_ = from_pretrained(folder)
    images = example_images(data.eval_transform(image()).shape[-1])
    found, own = (
        one.encode_images(images.to(part))[0].float() for one, part in ((half, dtype), (module, torch.float32))
    )
    lowest = cosine_similarity(found, own).min()
    assert 0 < 1 - lowest < 0.05
    printed = float(said.partition("have cosines from ")[2].split()[0])
    assert f"Features in {kind} against those in float32: those of images have cosines from" in said
    assert printed == pytest.approx(float(lowest), abs=2e-6)
    ran = run("export", tmp_path / "last.ckpt", tmp_path / "x", "--layout", "onnx", "--dtype", "float16")
    assert ran.status == 0, ran.err
    assert "those of texts have cosines from 0.999" in ran.out


def test_half_precisions_that_a_layout_has_not_are_refused(tmp_path):
    trained("clip", tmp_path)
    for layout, kind in (("open_clip", "float16"), ("onnx", "bfloat16"), ("executorch", "float16")):
        ran = run("export", tmp_path / "last.ckpt", tmp_path / "x", "--layout", layout, "--dtype", kind)
        assert ran.sentence.startswith(f"Expected float32 in the layout {layout} of CLIPModule, got {kind}: leave")
    assert [file.name for file in tmp_path.iterdir() if file.name == "x"] == []
    module = tiny_classifier(image_size=32)
    with torch.no_grad():
        module.head.weight.fill_(1e5)  # beyond float16
    trainer = Trainer(**QUIET, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "large.ckpt", weights_only=True)
    ran = run("export", tmp_path / "large.ckpt", tmp_path / "x", "--dtype", "float16")
    assert ran.sentence.startswith(
        "Expected finite features of images in float16, got others: leave --dtype out, or choose bfloat16."
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch):
    trained("clip", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    ran = run("export", tmp_path / "last.ckpt", tmp_path / "x", "--layout", "coreml")
    assert "Installing coremltools==9.0 once, into " in ran.out
    assert ran.sentence.startswith("Expected an environment with coremltools==9.0, which `python -m venv` and pip make")
    assert "No matching distribution found for coremltools==9.0" in ran.sentence
    assert not (tmp_path / "x").exists()
    assert [*(tmp_path / "cache").rglob("coremltools*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["coreml", "executorch"])
def test_another_package_converts_the_towers(layout, tmp_path):
    if os.environ.get(CONVERTERS_VARIABLE) != "1":
        pytest.skip(f"{CONVERTERS_VARIABLE} is not 1")
    trained("albef", tmp_path)
    folder, said = export(tmp_path, "made", "--layout", layout)
    config = json.loads((folder / "config.json").read_text())
    suffix = {"coreml": ".mlpackage", "executorch": ".pte"}[layout]
    for name, inputs in (("image", ["image"]), ("text", ["input_ids", "attention_mask"])):
        tower = config["towers"][name]
        assert tower["file"] == f"{name}{suffix}"
        assert (folder / tower["file"]).exists()
        assert [put["name"] for put in tower["inputs"]] == inputs
        assert tower["inputs"][0]["shape"][0] == 1
    if layout == "executorch":
        assert "Features of ExecuTorch's runtime against torch's: image.pte differs by at most" in said
    else:
        assert "image: inputs, output and" in said
