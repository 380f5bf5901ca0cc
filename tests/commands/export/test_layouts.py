"""Exports in other libraries' layouts, read by these libraries alone: each cell of the table in `docs/export.md`."""

import onnx
import onnxruntime
import pytest
import timm
import torch
import torchvision
from lightning.pytorch import Trainer
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity, normalize
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertModel,
    CLIPModel,
    ViTModel,
)

from support.methods.classifier import CLASSES, shape_classes, tiny_classifier
from support.methods.cocord import OFF, teacher_file
from support.methods.methods import METHODS, OTHERS
from support.methods.mmlg import tiny_extraction
from support.methods.probe import tiny_probe
from support.project.pages import blocks
from support.runs.command_line import run
from vlightning.commands.export.publishing import files_of
from vlightning.lightning_modules import CoCoRDLinearProbeModule, CoCoRDModule

KINDS = METHODS | OTHERS
TEXTS = ["a red circle above a blue square", "it is green"]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def image():
    return Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 60).convert("RGB")


def exported(module, data, folder, layout, target="made"):
    """Train for a step, export the checkpoint, and return the module in eval mode and the target."""
    trainer = Trainer(**QUIET, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    ran = run("export", folder / "last.ckpt", folder / target, "--layout", layout)
    assert ran.status == 0, ran.err
    assert "Loading" not in ran.err  # a progress bar of transformers
    made = folder / target
    if made.is_dir():  # `vlightning push` takes all of it
        assert set(files_of(made)) == {file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file()}
    return module.eval(), folder / target


def built(name, folder, **options):
    method = KINDS[name]
    return method.build(method.prepare(folder), seed=3, batch_size=8, num_workers=0, **options)


def as_the_page_says(words, **names):
    """Run the block of `docs/export.md` with some words, and return its variables."""
    (block,) = (block for block in blocks("docs/export.md", "python") if words in block)
    exec(block, names)
    return names


@pytest.mark.parametrize("name", ["clip", "MM-LG", "plain"])
@torch.no_grad()
def test_transformers_reads_a_clip_of_plain_towers(name, tmp_path):
    if name == "clip":
        module, data = built(name, tmp_path)
    else:
        _, data = built("mmlg", tmp_path)
        module = tiny_extraction(None, student=name)
    with torch.enable_grad():
        module, folder = exported(module, data, tmp_path, "transformers")
    model = CLIPModel.from_pretrained(folder).eval()
    own = data.encoder()(TEXTS)
    tokens = {"input_ids": own["input_ids"]}
    if (folder / "tokenizer.json").exists():
        tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, truncation=True, return_tensors="pt")
    pixels = AutoImageProcessor.from_pretrained(folder)(image(), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels[0], data.eval_transform(image()), rtol=0, atol=0.02)  # another resize
    found = model(pixel_values=pixels, **tokens)
    torch.testing.assert_close(found.image_embeds, module.encode_images(pixels)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_embeds, module.encode_texts(**own), rtol=0, atol=1e-5)


def test_towers_that_transformers_has_not_are_refused(tmp_path):
    module, data = built("mobileclip", tmp_path)
    exported(module, data, tmp_path, "vlightning")
    ran = run("export", tmp_path / "last.ckpt", tmp_path / "clip", "--layout", "transformers")
    assert ran.sentence.startswith("Expected open_clip's ViT and causal text tower for transformers' CLIPModel")
    assert not (tmp_path / "clip").exists()


@torch.no_grad()
def test_transformers_reads_albefs_encoders(tmp_path):
    with torch.enable_grad():
        module, data = built("albef", tmp_path)
        module, folder = exported(module, data, tmp_path, "transformers")
    vit = ViTModel.from_pretrained(folder / "image", add_pooling_layer=False).eval()
    bert = BertModel.from_pretrained(folder / "text", add_pooling_layer=False).eval()
    projections = load_file(folder / "projections.safetensors")
    pixels = AutoImageProcessor.from_pretrained(folder / "image")(image(), return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(folder / "text")(TEXTS, padding=True, return_tensors="pt")
    tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    for kind, states, own in (
        ("image", vit(pixel_values=pixels).last_hidden_state, module.encode_images(pixels)[0]),
        ("text", bert(**tokens).last_hidden_state, module.encode_texts(**tokens)),
    ):
        found = states[:, 0] @ projections[f"{kind}.weight"].T + projections[f"{kind}.bias"]
        own = own[0] if isinstance(own, tuple) else own
        torch.testing.assert_close(normalize(found, dim=-1), own, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "create"), [("resnet18", torchvision.models.resnet18), ("resnet10t", "timm")])
@torch.no_grad()
def test_torchvision_and_timm_read_cocords_student(name, create, tmp_path):
    _, data = built("cocord", tmp_path, length=8)
    with torch.enable_grad():
        module = CoCoRDModule(name, data.num_classes, **OFF)
        module, file = exported(module, data, tmp_path, "student", "student.safetensors")
    classes = {"num_classes": data.num_classes}
    model = timm.create_model(name, **classes) if create == "timm" else create(**classes)
    model.load_state_dict(load_file(file))
    pixels = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(model.eval()(pixels), module(pixels), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mmlg", "clip", "mobileclip"])
@torch.no_grad()
def test_onnx_runtime_reads_towers_with_int8_weights(name, tmp_path, monkeypatch):
    module, data = built(name, tmp_path)
    with torch.enable_grad():
        module = tiny_extraction(None) if name == "mmlg" else module
        module, folder = exported(module, data, tmp_path, "onnx_int8", "clip-onnx")
    found = {}
    for name, inputs in (
        ("image", {"image": torch.stack([data.eval_transform(image())]).numpy()}),
        ("text", {"input_ids": data.encoder()(TEXTS)["input_ids"].numpy()}),
    ):
        session = onnxruntime.InferenceSession(folder / f"{name}.onnx")
        found[name] = torch.from_numpy(session.run(None, inputs)[0])
        kinds = {tensor.data_type for tensor in onnx.load(folder / f"{name}.onnx").graph.initializer}
        assert onnx.TensorProto.INT8 in kinds
    expected = module.encode_images(data.eval_transform(image())[None])[0], module.encode_texts(**data.encoder()(TEXTS))
    for features, own in zip(found.values(), expected, strict=True):
        assert not torch.equal(features, own)
        assert cosine_similarity(features, own).min() > 0.98
    if (folder / "tokenizer.json").exists():
        monkeypatch.chdir(tmp_path)
        shown = as_the_page_says("clip-onnx", image=image())
        assert cosine_similarity(torch.tensor(shown["images"]), expected[0]).min() > 0.98
        own = module.encode_texts(**data.encoder()(["a red circle", "a blue square"]))
        assert cosine_similarity(torch.tensor(shown["texts"]), own).min() > 0.98


def classifier(name, folder):
    """A classifier of images of 32 pixels, and its data."""
    data = shape_classes(image_size=32)
    if name == "CoCoRDModule":
        return CoCoRDModule("resnet8", CLASSES, **OFF), data
    if name == "CoCoRDLinearProbeModule":
        return CoCoRDLinearProbeModule("resnet8", 5, teacher_file(folder, "resnet8", 5), num_classes=CLASSES), data
    return (tiny_classifier if name == "MMLGImageClassifierModule" else tiny_probe)(image_size=32), data


def onnx_output(file, *inputs):
    session = onnxruntime.InferenceSession(file)
    named = zip(session.get_inputs(), inputs, strict=True)
    return torch.from_numpy(session.run(None, {put.name: tensor.numpy() for put, tensor in named})[0])


@pytest.mark.parametrize(
    "name", ["CoCoRDModule", "MMLGImageClassifierModule", "SHReImageClassifierModule", "CoCoRDLinearProbeModule"]
)
@torch.no_grad()
def test_torch_exports_a_classifier_as_the_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.enable_grad():
        module, _ = exported(*classifier(name, tmp_path), tmp_path, "vlightning", "my-classifier")
    as_the_page_says("my-classifier")
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(onnx_output("classifier.onnx", images), module(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["torch_export", "onnx", "onnx_int8"])
@pytest.mark.parametrize("name", ["albef", "shre"])
@torch.no_grad()
def test_encoders_are_programs_with_a_tokenizer_and_no_other_weights(name, layout, tmp_path):
    module, data = built(name, tmp_path)
    with torch.enable_grad():
        module, folder = exported(module, data, tmp_path, layout)
    texts = [*TEXTS, "a"]
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch([text.lower() for text in texts])
    ids, mask = (torch.tensor([getattr(text, part) for text in encoded]) for part in ("ids", "attention_mask"))
    assert mask.sum(1).unique().numel() > 1
    images = torch.rand(3, *data.eval_transform(image()).shape)
    own = {name: tensor for name, tensor in module.student.named_parameters() if "fusion" not in name}
    if layout == "torch_export":
        programs = {part: torch.export.load(folder / f"{part}.pt2") for part in ("image", "text")}
        found = programs["image"].module()(images), programs["text"].module()(ids, mask)
        stored = [tensor.numel() for program in programs.values() for tensor in program.state_dict.values()]
        assert sum(stored) < 1.2 * sum(tensor.numel() for tensor in own.values())
    else:
        found = onnx_output(folder / "image.onnx", images), onnx_output(folder / "text.onnx", ids, mask)
    expected = module.encode_images(images)[0], module.encode_texts(**data.encoder()(texts))
    for features, own in zip(found, expected, strict=True):
        if layout == "onnx_int8":
            assert not torch.equal(features, own)
            assert cosine_similarity(features, own).min() > 0.98
        else:
            torch.testing.assert_close(features, own, rtol=0, atol=1e-5)
