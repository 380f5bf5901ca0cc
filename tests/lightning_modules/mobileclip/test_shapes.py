"""Models by the shape of their towers: files, fields, checkpoints."""

import dataclasses
import json

import pytest
import torch
import yaml

from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.core.precision import unit
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import PRESETS, build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.lightning_modules.networks.clip.shapes import ModelShape, resolved
from vlightning.lightning_modules.networks.published_clip import load_published

OWN = {
    "image_tower": "fastvit_mci_tiny",
    "image_options": {"layers": [1, 2, 1, 1], "embed_dims": [16, 32, 64, 128]},
    "image_size": 32,
    "embed_dim": 24,
    "width": 64,
    "layers": 1,
    "std": [0.5, 0.5, 0.5],
}


@pytest.fixture(params=["yaml", "json"])
def file(tmp_path, request):
    path = tmp_path / f"shape.{request.param}"
    path.write_text(yaml.safe_dump(OWN) if request.param == "yaml" else json.dumps(OWN))
    return path


def student(model, **options):
    return MobileCLIPModule(model, max_tokens=8, **options)


def shapes(network):
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def test_a_preset_written_as_a_file_is_that_preset(tmp_path):
    path = tmp_path / "tiny.yaml"
    fields = {
        name: value for name, value in dataclasses.asdict(PRESETS["MobileCLIP-tiny"]).items() if value is not None
    }
    path.write_text(yaml.safe_dump(json.loads(json.dumps(fields))))
    assert resolved(str(path)) == PRESETS["MobileCLIP-tiny"]
    assert shapes(build_model(str(path))) == shapes(build_model("MobileCLIP-tiny"))


def test_a_student_has_the_shape_of_its_file(file):
    module = student(str(file))
    trunk = module.student.visual.trunk
    assert [len(stage.blocks) for stage in trunk.stages] == [1, 2, 1, 1]
    assert [stage.blocks[0].mlp.fc2.out_channels for stage in trunk.stages] == [16, 32, 64, 128]
    assert module.student.text.width == 64
    assert len(module.student.text.transformer.resblocks) == 1
    image, text = module(
        {"image": torch.rand(2, 3, 32, 32), "input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": None}
    )
    assert image.shape == text.shape == (2, 24)
    assert module.expected_image_size() == 32
    assert preprocessing_of(module.model).std == (0.5, 0.5, 0.5)


def test_a_checkpoint_needs_no_file(file, tmp_path):
    module = student(str(file), teacher={"distillation_weight": 0.0}).eval()
    path = tmp_path / "student.ckpt"
    content = {
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "pytorch-lightning_version": "2.6.6",
    }
    torch.save(content, path)
    published = load_published(str(file), str(path))
    file.unlink()
    again = MobileCLIPModule.load_from_checkpoint(path, weights_only=True).eval()
    assert again.model == module.model == resolved(OWN)
    image = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = module.encode_images(image)[0]
        torch.testing.assert_close(again.encode_images(image)[0], expected)
        torch.testing.assert_close(unit(published.network.encode_image(image)), expected)
    assert published.preprocessing.std == (0.5, 0.5, 0.5)


def test_an_export_needs_no_file(file, tmp_path):
    module = student(str(file), momentum={"momentum": None}).eval()
    module.save_pretrained(tmp_path / "folder")
    file.unlink()
    again = MobileCLIPModule.from_pretrained(tmp_path / "folder")
    assert again.model == module.model
    image = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(again.encode_images(image)[0], module.encode_images(image)[0])


def test_the_command_line_takes_a_file_or_fields(tmp_path):
    path = tmp_path / "shape.yaml"
    path.write_text(yaml.safe_dump(OWN))
    words = ("fit", "--model", "MobileCLIPModule", "--data", "ReinforcedShapesDataModule", "--print_config")
    found = run(*words, "--model.model", str(path))
    assert found.status == 0, found.err
    assert yaml.safe_load(found.out)["model"]["init_args"]["model"] == str(path)
    found = run(*words, "--model.model", json.dumps(OWN))
    assert found.status == 0, found.err
    assert resolved(yaml.safe_load(found.out)["model"]["init_args"]["model"]) == resolved(OWN)


def test_a_shape_is_written_for_open_clip_if_it_can_build_it(tmp_path):
    plain = {name: value for name, value in OWN.items() if name != "image_options"}
    network = build_model(plain)
    save_open_clip(network, plain, preprocessing_of(plain), tmp_path / "folder")
    assert (tmp_path / "folder/open_clip_config.json").is_file()
    with pytest.raises(UserError, match="Expected the fastvit_mci_tiny of its own shape that open_clip builds"):
        save_open_clip(build_model(OWN), OWN, preprocessing_of(OWN), tmp_path / "other")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_tower": "fastvit_mci_tiniest"}, "Expected an image_tower of timm, .*did you mean 'fastvit_mci_tiny'"),
        ({"image_tower": None}, "Expected an image_tower in 'shape.yaml', got none"),
        ({"widths": 64}, "Expected fields of ModelShape, got 'widths': did you mean 'width'"),
        ({"width": 100}, "Expected a width of a multiple of 64"),
        ({"image_options": {"depths": [1, 1]}}, "Expected image_options of timm's fastvit_mci_tiny"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(changed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape.yaml").write_text(
        yaml.safe_dump({name: value for name, value in (OWN | changed).items() if value is not None})
    )
    with pytest.raises(UserError, match=message):
        build_model("shape.yaml")
    with pytest.raises(UserError, match=r"found none at 'other\.yaml'"):
        resolved("other.yaml")
    assert isinstance(resolved(OWN), ModelShape)


def test_a_run_of_a_file_is_validated_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "shape.yaml"
    path.write_text(yaml.safe_dump(OWN))
    data = {"length": 8, "eval_length": 4, "augmentations": 1, "batch_size": 4, "image_size": 32, "num_workers": 0}
    options = [f"--data.{name}={value}" for name, value in data.items()]
    short = ("--trainer.max_steps=1", "--trainer.accelerator=cpu", "--model.teacher.distillation_weight=0")
    words = ("--model=MobileCLIPModule", f"--model.model={path}", "--data=ReinforcedShapesDataModule", *options)
    ran = run("fit", *words, *short)
    assert ran.status == 0, ran.err
    path.unlink()
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    ran = run("validate", "--ckpt_path", str(checkpoint))
    assert ran.status == 0, ran.err
    # One text for each of four images.
    rows = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines() if line.startswith(("val/", "metric"))}
    assert rows["metric"] == ["value", "chance"]
    assert rows["val/text_to_image_r1"][1] == rows["val/image_to_text_r1"][1] == "25"
    assert rows["val/text_to_image_r5"] == ["100", "100"]
    assert ran.out.endswith("Evaluated: 4 images, 4 texts\n")
    (file,) = tmp_path.rglob("metrics.json")
    assert file.parent.name.endswith("_validate_0")
    found = json.loads(file.read_text())
    assert (found["stage"], found["step"], found["images"], found["texts"]) == ("validate", 1, 4, 4)
    assert found["checkpoint"] == str(checkpoint)
    assert f"{found['metrics']['val/recall_mean']:.4g}" == rows["val/recall_mean"][0]
    assert found["chance"]["val/image_to_text_r1"] == pytest.approx(25)
