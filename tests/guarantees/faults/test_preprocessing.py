"""Every export, and every training with loaded weights, uses the preprocessing of the evaluation."""

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from lightning import Callback, Trainer
from PIL import Image
from safetensors import safe_open
from torch import nn
from torch.nn.functional import normalize

from support.methods.albef import tiny_albef
from support.methods.clip import LENGTH, SIZE, add_tiny_clip, randomized
from support.methods.cocord import OFF
from support.methods.mmlg import tiny_extraction
from support.methods.programs import leave_unwritten
from support.runs.command_line import run
from vlightning.callbacks.learngene.file import load_learngene
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.export.layouts import export
from vlightning.common.errors import UserError
from vlightning.datamodules import (
    CLIPEvalTransform,
    ImageClassificationDataModule,
    ImageTextDataModule,
    ReinforcedImageTextDataModule,
    ReinforcedShapesDataModule,
    ShapesDataModule,
)
from vlightning.lightning_modules import ALBEFModule, CoCoRDModule, MobileCLIPModule
from vlightning.lightning_modules.networks.clip.files import save_vendor, write_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.lightning_modules.networks.published_clip import load_published

CLIP_WORDS = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": LENGTH}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
OWN = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
COUNT = 6


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Oblong images with fine detail, their list, and the same in a folder for each of two classes."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    lines = []
    for number in range(COUNT):
        coarse = Image.fromarray(generator.integers(0, 256, (8, 12, 3), dtype=np.uint8))
        name = f"classes/{number % 2}/{number}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((90, 60), Image.Resampling.BICUBIC).save(folder / name)
        lines.append(json.dumps({"image": name, "caption": f"image {number} of {COUNT}"}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


class Seen(Callback):
    """Records the features or logits of each image in a test."""

    def __init__(self):
        self.found = []

    def on_test_batch_end(self, trainer, module, outputs, batch, *_):
        say = (lambda image: module.encode_images(image)[0]) if hasattr(module, "encode_images") else module
        with torch.no_grad():
            self.found.append(say(batch["image"]))


def trained(module, data, folder):
    """Train a step, test the checkpoint, and return the checkpoint and the recorded outputs."""
    trainer = Trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False, default_root_dir=folder, **QUIET)
    trainer.fit(module, data)
    file = str(folder / "last.ckpt")
    trainer.save_checkpoint(file)
    return file, shown(module, data, file)


def shown(module, data, checkpoint=None):
    seen = Seen()
    Trainer(callbacks=[seen], **QUIET).test(module, data, ckpt_path=checkpoint, verbose=False)
    return torch.cat(seen.found)


def as_told(look, folder):
    """Preprocess the images by a record alone."""
    way = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[look["interpolation"]]
    size, side = look["image_size"], look["resize"] or look["image_size"]
    ready = []
    for number in range(COUNT):
        image = Image.open(folder / f"classes/{number % 2}/{number}.png").convert("RGB")
        width, height = image.size
        scale = side / min(width, height)
        new = (side, side) if look["resize_mode"] == "squash" else (int(width * scale), int(height * scale))
        image = image.resize(new, way)
        left, top = round((image.width - size) / 2), round((image.height - size) / 2)
        pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float32) / 255
        ready.append((pixels - look["mean"]) / look["std"])
    return torch.from_numpy(np.stack(ready)).permute(0, 3, 1, 2).float().contiguous()


def pairs(images, **options):
    file = str(images / "pairs.jsonl")
    defaults = {"train": file, "test": file, "batch_size": COUNT, "num_workers": 0}
    return ImageTextDataModule(**defaults | CLIP_WORDS | {"cache_dir": str(images / "cache")} | options)


def reinforced(images, **options):
    shards = ReinforcedShapesDataModule(str(images / "shards"), length=COUNT, eval_length=2, image_size=SIZE)
    shards.prepare_data()
    sizes = {"image_size": SIZE, "max_tokens": LENGTH, "batch_size": COUNT, "num_workers": 0}
    sizes |= {"test": str(images / "pairs.jsonl"), "cache_dir": str(images / "cache")}
    return ReinforcedImageTextDataModule(str(shards.folder), **sizes | options)


DATA = {
    "pairs": pairs,
    "pairs, transform given": lambda folder: pairs(
        folder, eval_transform=CLIPEvalTransform(SIZE, OWN["mean"], OWN["std"], "bilinear")
    ),
    "reinforced": reinforced,
    "reinforced, normalized": lambda folder: reinforced(folder, image_mean=OWN["mean"], image_std=OWN["std"]),
}


def mobileclip(name=None, distillation_weight=1.0, **options):
    torch.manual_seed(0)
    teacher = {"dims": [64, 96], "scales": [30.0, 30.0], "distillation_weight": distillation_weight}
    options = {"max_tokens": LENGTH, "momentum": {"momentum": None}, "teacher": teacher} | options
    module = MobileCLIPModule(name or add_tiny_clip(), **options)
    if name is None:
        randomized(module.student)
    return module


@pytest.mark.parametrize("kind", DATA)
def test_an_exported_mobileclip_gives_the_features_of_its_test(kind, images, tmp_path):
    data = DATA[kind](images)
    module = mobileclip(distillation_weight=float(kind.startswith("reinforced")))
    checkpoint, features = trained(module, data, tmp_path)
    assert "nothing is known" not in export(checkpoint, str(tmp_path / "made"), "open_clip")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'made'}")
    files = [Image.open(images / f"classes/{number % 2}/{number}.png") for number in range(COUNT)]
    teachers = [
        load_published(None, str(tmp_path / "made")),
        load_published(add_tiny_clip(), checkpoint),
    ]
    with torch.no_grad():
        found = [model.eval().encode_image(torch.stack([transform(file) for file in files]))]
        for teacher in teachers:
            prepare = teacher.preprocessing.transform()
            found.append(teacher.network.encode_image(torch.stack([prepare(file) for file in files])))
    for outside in found:
        torch.testing.assert_close(normalize(outside, dim=-1), features, rtol=0, atol=1e-5)


def test_onnx_programs_with_the_recorded_preprocessing_give_the_features_of_the_test(images, tmp_path, monkeypatch):
    """Train a plain CLIP on pairs through the command line, test it, and export it."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    add_tiny_clip()
    file = images / "pairs.jsonl"
    words = [f"--data.{split}={file}" for split in ("train", "validation", "test")]
    words += ["--data.tokenizer=clip", "--data.vocab_size=49408", f"--data.max_tokens={LENGTH}", "--data.num_workers=0"]
    words += ["--data.batch_size=6", f"--data.cache_dir={images / 'cache'}", "--trainer.accelerator=cpu"]
    model = [
        f"--model.model={add_tiny_clip()}",
        "--model.teacher.distillation_weight=0",
        "--model.momentum.momentum=null",
    ]
    words += ["--trainer.max_steps=1", "--trainer.enable_progress_bar=false"]
    ran = run("fit", "--model=MobileCLIPModule", *model, "--data=ImageTextDataModule", *words)
    assert ran.status == 0, ran.err
    (checkpoint,) = tmp_path.glob("runs/**/last.ckpt")
    module = MobileCLIPModule.load_from_checkpoint(checkpoint)
    features = shown(module, pairs(images))
    with monkeypatch.context() as patched:
        leave_unwritten(patched, "text")
        export(str(checkpoint), "made", "onnx")
    look = json.loads(Path("made/config.json").read_text())["preprocessing"]
    assert (look["image_size"], look["resize_mode"], look["interpolation"]) == (SIZE, "squash", "bicubic")
    session = onnxruntime.InferenceSession("made/image.onnx")
    (found,) = session.run(None, {"image": as_told(look, images).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), features, rtol=0, atol=1e-4)
    leave_unwritten(monkeypatch, "image", "text")
    module.export(tmp_path / "by_hand")  # as FinalExport does
    assert json.loads(Path("by_hand/config.json").read_text())["preprocessing"] == look


def shapes(folder):
    return ShapesDataModule(batch_size=8, image_size=SIZE, length=8, eval_length=8, **CLIP_WORDS)


@pytest.mark.parametrize("data", [pairs, shapes])
def test_an_exported_mmlg_gives_the_features_of_its_test(data, images, tmp_path):
    data = data(images)
    checkpoint, features = trained(tiny_extraction(None), data, tmp_path)
    export(checkpoint, str(tmp_path / "made"), "open_clip")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'made'}")
    loaded = load_model(checkpoint)
    originals = [data.image("test", number) for number in range(COUNT)]
    with torch.no_grad():
        found = [model.eval().encode_image(torch.stack([transform(image) for image in originals]))]
        found.append(loaded.images(torch.stack([loaded.prepared(image) for image in originals])))
    for outside in found:
        torch.testing.assert_close(normalize(outside, dim=-1), features[:COUNT], rtol=0, atol=1e-5)
    export(checkpoint, str(tmp_path / "learngene.safetensors"), "learngene")
    assert load_learngene(tmp_path / "learngene.safetensors").preprocessing == data.preprocessing


def test_an_exported_albef_records_its_preprocessing(images, tmp_path):
    prepare = CLIPEvalTransform(16, OWN["mean"], OWN["std"], "bilinear")
    data = pairs(images, eval_transform=prepare, tokenizer=None, vocab_size=200, max_tokens=16)
    checkpoint, features = trained(tiny_albef(text={"vocab_size": 200}), data, tmp_path)
    export(checkpoint, str(tmp_path / "made"))
    look = json.loads((tmp_path / "made" / "config.json").read_text())["preprocessing"]
    albef = ALBEFModule.from_pretrained(tmp_path / "made")
    with torch.no_grad():
        found = albef.encode_images(as_told(look, images))[0]
    torch.testing.assert_close(found, features, rtol=0, atol=1e-4)
    assert "normalized with mean (0.1, 0.2, 0.3)" in export(checkpoint, str(tmp_path / "made.pth"), "albef")
    assert albef.expected_preprocessing() == look
    # It is evaluated so on other data too, unless that says how.
    words = {"tokenizer": str(tmp_path / "made"), "vocab_size": 200, "max_tokens": 16}
    torch.testing.assert_close(shown(albef, pairs(images, **words)), features, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("preset", "resize"), [("cifar", None), ("imagenet", 37)])
def test_an_exported_classifier_records_its_preprocessing(preset, resize, images, tmp_path):
    folder = str(images / "classes")
    sizes = {"image_size": 32, "batch_size": COUNT, "num_workers": 0, "cache_dir": str(images / "cache")}
    data = ImageClassificationDataModule(train=folder, test=folder, preset=preset, **sizes)
    module = CoCoRDModule("resnet8", 2, **OFF)
    checkpoint, logits = trained(module, data, tmp_path)
    export(checkpoint, str(tmp_path / "student.safetensors"))
    with safe_open(tmp_path / "student.safetensors", "pt") as file:
        look = json.loads(file.metadata()["preprocessing"])
    assert look["resize"] == resize
    export(checkpoint, str(tmp_path / "student.pth"))
    assert torch.load(tmp_path / "student.pth", weights_only=True)["preprocessing"] == look
    outside = CoCoRDModule("resnet8", 2, str(tmp_path / "student.pth"), **OFF).eval()
    outside.load_initial_weights()
    unsaid = ImageClassificationDataModule(test=folder, num_workers=0, cache_dir=str(images / "cache"))
    torch.testing.assert_close(shown(module, unsaid, checkpoint), logits, rtol=0, atol=1e-6)
    names = [str(file.stem) for file in sorted((images / "classes").rglob("*.png"))]
    with torch.no_grad():
        found = outside(as_told(look, images))[[int(name) for name in names]]
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-4)


class Unknown(nn.Module):
    """A transform that does not describe itself."""

    def forward(self, image):
        return torch.zeros(3, SIZE, SIZE)


def test_an_unknown_transform_is_reported_and_not_recorded_as_another(images, tmp_path, monkeypatch):
    leave_unwritten(monkeypatch, "image", "text")
    checkpoint, _ = trained(mobileclip(distillation_weight=0), pairs(images, eval_transform=Unknown()), tmp_path)
    with pytest.raises(UserError, match=r"Expected a transform that describes itself, got .*Unknown"):
        export(checkpoint, str(tmp_path / "made"), "open_clip")
    with pytest.raises(UserError, match=r"Expected a transform that describes itself, .*Unknown"):
        load_published(add_tiny_clip(), checkpoint)
    assert "Unknown, cannot be recorded" in export(checkpoint, str(tmp_path / "programs"), "torch_export")
    written = json.loads((tmp_path / "programs" / "config.json").read_text())["preprocessing"]
    assert written == {"transform": f"{Unknown.__module__}.Unknown"}
    larger = CLIPEvalTransform(SIZE, resize=SIZE + 2)
    checkpoint, _ = trained(mobileclip(distillation_weight=0), pairs(images, eval_transform=larger), tmp_path)
    with pytest.raises(UserError, match="got a resize to 18 pixels before a crop to 16"):
        export(checkpoint, str(tmp_path / "made"), "open_clip")
    assert not (tmp_path / "made").exists()


def mean_of(data):
    transform = data.train_transform
    return tuple(transform.finish.mean)


def test_published_weights_get_images_with_their_preprocessing(images, tmp_path):
    model = build_model("MobileCLIP-tiny", context_length=LENGTH)
    save_vendor(model, tmp_path / "tiny.pt")
    module = mobileclip("MobileCLIP-tiny", weights=str(tmp_path / "tiny.pt"))
    data = pairs(images)
    shown(module, data)
    own = preprocessing_of("MobileCLIP-tiny")
    assert data.preprocessing == vars(own) | {"mean": list(own.mean), "std": list(own.std)}
    assert data.image_size == own.image_size
    assert mean_of(data) == own.mean
    typed = pairs(images, image_size=64, eval_transform=CLIPEvalTransform(64, OWN["mean"], OWN["std"]))
    shown(module, typed)
    assert typed.preprocessing["mean"] == list(OWN["mean"])


def test_a_checkpoint_is_evaluated_on_other_data_with_its_preprocessing(images, tmp_path):
    module = mobileclip()
    checkpoint, features = trained(module, reinforced(images, image_mean=OWN["mean"]), tmp_path)
    for data, found in (
        (pairs(images), mobileclip()),
        (reinforced(images), mobileclip()),
    ):
        torch.testing.assert_close(shown(found, data, checkpoint), features, rtol=0, atol=1e-6)
    again = mobileclip(weights=checkpoint, distillation_weight=0)
    torch.testing.assert_close(shown(again, pairs(images)), features, rtol=0, atol=1e-6)


def test_a_module_is_tested_on_other_data_with_the_preprocessing_of_its_training(images, tmp_path):
    module, trainer = mobileclip(), Trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False, **QUIET)
    trained_on = reinforced(images, image_mean=OWN["mean"])
    trainer.fit(module, trained_on)
    features = shown(module, trained_on)
    torch.testing.assert_close(shown(module, pairs(images)), features, rtol=0, atol=1e-6)


def test_a_teacher_determines_its_students_preprocessing(images, tmp_path):
    torch.manual_seed(0)
    clip = open_clip.create_model(add_tiny_clip())
    look = preprocessing_of(add_tiny_clip())
    assert look.resize_mode == "shortest"
    write_open_clip(clip, open_clip.get_model_config(add_tiny_clip()), look, tmp_path / "teacher")
    module = tiny_extraction(str(tmp_path / "teacher"))
    data = pairs(images)
    trained(module, data, tmp_path)
    assert data.preprocessing["resize_mode"] == "shortest"
    other = tiny_extraction(str(tmp_path / "teacher"))
    with pytest.raises(UserError, match=r"Expected image_mean .* for the teacher .*, got \[0.1, 0.2, 0.3\]"):
        trained(other, pairs(images, eval_transform=CLIPEvalTransform(SIZE, OWN["mean"], OWN["std"])), tmp_path)
