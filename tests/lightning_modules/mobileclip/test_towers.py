"""Towers alone and as exported programs have the features of the model for any batch size."""

import functools
import json
import logging
import warnings
from collections import Counter

import onnx
import onnxruntime
import open_clip
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.mobileclip import build_shallow, settle
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mobileclip import programs as module_under_test
from vlightning.lightning_modules.mobileclip.models import build_model
from vlightning.lightning_modules.mobileclip.programs import export_towers
from vlightning.lightning_modules.mobileclip.towers import towers

SIZE = 64
MODELS = ["MobileCLIP-tiny", "MobileCLIP-S0", "MobileCLIP-B"]
PLAIN = {
    "embed_dim": 24,
    "vision_cfg": {"layers": 1, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": 1},
}


def batch(model, count, size=SIZE, seed=5):
    """Return dissimilar images and texts."""
    generator = torch.Generator().manual_seed(seed)
    length, end = model.context_length, model.vocab_size - 1
    ids = torch.randint(1, end, (count, length), generator=generator)
    for row, last in zip(ids, torch.randint(1, length, (count,), generator=generator), strict=True):
        row[last:] = 0
        row[last] = end
    return F.interpolate(torch.rand(count, 3, 4, 4, generator=generator), size), ids


@functools.cache
def trained(name):
    """Return a model, of which the real ones have few layers.

    Its BatchNorm statistics are those of its inputs; otherwise all images have nearly equal features.
    """
    torch.manual_seed(0)
    model = settle((build_model if name == "MobileCLIP-tiny" else build_shallow)(name, SIZE))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
    features(model.train(), *batch(model, 8, seed=6))
    return model.eval()


@torch.no_grad()
def features(model, images, ids, normalize=True):
    return model.encode_image(images, normalize=normalize), model.encode_text(ids, normalize=normalize)


def plain_clip(**options):
    torch.manual_seed(0)
    return open_clip.CLIP(**PLAIN, **options).eval()


@functools.lru_cache(maxsize=2)
def program(file):
    """Return the program of a file, which takes a second to read."""
    return torch.export.load(file)


def load(folder):
    """Return a function that runs the files of a folder without this project."""

    def read(name, input_name):
        if (folder / f"{name}.pt2").exists():
            return program(folder / f"{name}.pt2").module()
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        session = onnxruntime.InferenceSession(folder / f"{name}.onnx", options)
        return lambda given: torch.from_numpy(session.run([f"{name}_features"], {input_name: given.numpy()})[0])

    image, text = read("image", "image"), read("text", "input_ids")
    return torch.no_grad()(lambda images, ids: (image(images), text(ids)))


def operations(file):
    if file.suffix == ".onnx":
        return Counter(node.op_type for node in onnx.load(file).graph.node)
    graph = program(file).graph
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def norms(file):
    return sum(count for name, count in operations(file).items() if "batchnorm" in name.replace("_", "").lower())


def smallest_cosine(found, expected):
    return float(F.cosine_similarity(found.float(), expected.float()).min())


def check_programs(model, folder, size):
    """Compare files with their model on batch sizes that were neither traced nor checked."""
    programs = load(folder)
    for count in (1, 5):
        inputs = batch(model, count, size)
        for found, right in zip(programs(*inputs), features(model, *inputs), strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
            if count > 1:  # far more than the tolerance lies between any two rows
                assert float(torch.pdist(right).min()) > 1e-2


@pytest.mark.parametrize("format", ["torch_export", "onnx"])
@pytest.mark.parametrize("name", MODELS)
def test_programs_equal_the_model_for_any_batch_size(name, format, tmp_path):
    model = trained(name)
    files = export_towers(model, tmp_path / "new" / "export", format, SIZE)
    suffix = {"torch_export": "pt2", "onnx": "onnx"}[format]
    assert [file.name for file in files] == ["config.json", f"image.{suffix}", f"text.{suffix}"]
    assert all(file.exists() for file in files)
    check_programs(model, tmp_path / "new" / "export", SIZE)
    assert [norms(file) for file in files[1:]] == [0, 0]


PREPROCESSING = {"mean": (0.0, 0.1, 0.2), "interpolation": "bicubic"}


def check_silent(folder, format, capfd, recwarn):
    model = plain_clip()
    export_towers(model, folder, format, 32, preprocessing=PREPROCESSING)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    check_programs(model, folder, 32)


def test_export_of_open_clips_class_is_silent(tmp_path, capfd, recwarn):
    check_silent(tmp_path, "torch_export", capfd, recwarn)


def test_norms_stay_without_reparameterization(tmp_path):
    tiny = trained("MobileCLIP-tiny")
    export_towers(tiny, tmp_path, "torch_export", SIZE, fused=False, normalize=False)
    assert norms(tmp_path / "image.pt2") > 10
    assert norms(tmp_path / "text.pt2") > 2
    inputs = batch(tiny, 4)
    for found, right in zip(load(tmp_path)(*inputs), features(tiny, *inputs, normalize=False), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found.norm(dim=1), torch.ones(4), atol=0.01)


def test_export_to_onnx_is_silent_and_its_configuration_describes_inputs_and_outputs(tmp_path, capfd, recwarn):
    check_silent(tmp_path, "onnx", capfd, recwarn)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["towers"]["image"] == {
        "file": "image.onnx",
        "input": {"name": "image", "shape": ["batch", 3, 32, 32], "dtype": "float32"},
        "output": {"name": "image_features", "shape": ["batch", 24], "dtype": "float32"},
    }
    assert config["preprocessing"] == {"mean": [0.0, 0.1, 0.2], "interpolation": "bicubic"}
    assert (config["class"], config["dtype"], config["fused"], config["normalize"], config["context_length"]) == (
        ("CLIP", "float32", True, True, 16)
    )
    assert config["versions"]["torch"] == torch.__version__.split("+")[0]
    for name, tower in config["towers"].items():  # what the files themselves say
        session = onnxruntime.InferenceSession(tmp_path / tower["file"])
        (given,), (taken,) = session.get_inputs(), session.get_outputs()
        assert (given.name, given.shape) == (tower["input"]["name"], tower["input"]["shape"])
        assert (taken.name, taken.shape) == (tower["output"]["name"], tower["output"]["shape"])
        assert taken.name == f"{name}_features"


# Rounding weights to bfloat16 alone costs a tower of many convolutions 5e-4.
@pytest.mark.parametrize(("dtype", "image_bound"), [(torch.float16, 0.9995), (torch.bfloat16, 0.998)])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_features_are_close(name, dtype, image_bound):
    model = trained(name)
    images, ids = batch(model, 4)
    expected = features(model, images, ids)
    for fused in (True, False):
        image, text = towers(model, fused=fused, dtype=dtype)
        assert {parameter.dtype for tower in (image, text) for parameter in tower.parameters()} == {dtype}
        found = image(images), text(ids)
        assert {feature.dtype for feature in found} == {dtype}
        assert smallest_cosine(found[0], expected[0]) > image_bound
        assert smallest_cosine(found[1], expected[1]) > 0.9995
        for feature in found:
            torch.testing.assert_close(feature.float().norm(dim=1), torch.ones(4), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_that_cast_only_their_input_support_half_precision(dtype):
    model = plain_clip(cast_dtype=torch.float16)  # as open_clip makes its half-precision models
    inputs = batch(model, 4, 32)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        features(plain_clip(cast_dtype=torch.float16).to(dtype), inputs[0].to(dtype), inputs[1])
    for tower, right, given in zip(towers(model, dtype=dtype), features(model, *inputs), inputs, strict=True):
        assert smallest_cosine(tower(given), right) > 0.9995


@pytest.mark.parametrize(("format", "dtype"), [("onnx", torch.float16), ("torch_export", torch.bfloat16)])
def test_half_precision_programs_take_float32_images(format, dtype, tmp_path):
    model = plain_clip()
    export_towers(model, tmp_path, format, 32, dtype=dtype)
    inputs = batch(model, 5, 32)
    for found, right in zip(load(tmp_path)(*inputs), features(model, *inputs), strict=True):
        assert found.dtype == dtype
        assert smallest_cosine(found, right) > 0.9995
    said = json.loads((tmp_path / "config.json").read_text())["towers"]["image"]
    assert (said["input"]["dtype"], said["output"]["dtype"]) == ("float32", str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("fused", [True, False])
def test_towers_are_copies(fused):
    model = plain_clip(init_logit_bias=0.5).requires_grad_(True)
    names = list(model.state_dict())
    image, text = towers(model, fused, dtype=torch.bfloat16)
    assert list(model.state_dict()) == names
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for tower in (image, text) for parameter in tower.parameters())
    kept = [name.split(".", 1)[1] for name in text.state_dict()]
    assert sorted([*kept, *image.state_dict()]) == sorted(set(names) - {"logit_scale", "logit_bias"})


@pytest.mark.parametrize("format", ["torch_export", "onnx"])
def test_differing_programs_are_not_written(format, tmp_path, monkeypatch):
    write = module_under_test._write

    def write_another(part, path, target):
        if part.name == "text":
            next(part.tower.parameters()).mul_(1.01)
        write(part, path, target)

    monkeypatch.setattr(module_under_test, "_write", write_another)
    with pytest.raises(UserError, match=r"the exported text tower, got .*-0.* on a batch of 1"):
        export_towers(plain_clip(), tmp_path / "export", format, 32)
    assert list(tmp_path.iterdir()) == []


def test_half_precision_programs_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test, "_load", lambda path: lambda inputs: torch.randn(len(inputs), 24))
    with pytest.raises(UserError, match=r"Expected a cosine of at least 0.9995 .* image tower"):
        export_towers(plain_clip(), tmp_path / "export", "torch_export", 32, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_exporters_are_silent_except_for_errors(capfd, recwarn, caplog):
    with module_under_test._quiet():
        print("Step 1 of 3")
        warnings.warn("This will change", stacklevel=1)
        logging.getLogger("onnxscript").warning("Skipping constant folding")
        logging.getLogger("onnxscript").error("Out of memory")
    assert capfd.readouterr().out == ""
    assert not recwarn.list
    assert caplog.messages == ["Out of memory"]
    assert logging.root.manager.disable == logging.NOTSET


def test_existing_files_are_kept(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="which exists"):
        export_towers(plain_clip(), tmp_path, "torch_export", 32)
    with pytest.raises(OSError, match="could not be written"):
        export_towers(plain_clip(), tmp_path / "mine" / "export", "torch_export", 32)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"image_size": 40}, UserError, r"got 40 pixels \(.+\): correct image_size"),
        ({"format": "onnx", "dtype": torch.bfloat16}, UserError, r"bfloat16, which ONNX.*torch_export"),
        ({"format": "tflite"}, UserError, r"Expected the format torch_export or onnx, got 'tflite'"),
        ({"model": nn.Linear(2, 2)}, UserError, "Expected open_clip's CLIP or CustomTextCLIP.* got a Linear"),
        ({"model": open_clip.CLIP(24, {"layers": [1] * 4, "width": 8}, PLAIN["text_cfg"])}, UserError, "call eval"),
    ],
)
def test_refused_exports_name_the_reason(options, error, message, tmp_path):
    given = {"model": plain_clip(), "format": "torch_export", "image_size": 32} | options
    with pytest.raises(error, match=message):
        export_towers(folder=tmp_path / "export", **given)
    assert list(tmp_path.iterdir()) == []


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    there = module_under_test.find_spec
    monkeypatch.setattr(module_under_test, "find_spec", lambda name: None if "onnxscript" in name else there(name))
    with pytest.raises(UserError, match=r'^Expected onnxscript .*`pip install "vlightning\[onnx\]"`\.$'):
        export_towers(plain_clip(), tmp_path / "export", "onnx", 32)


def test_onnx_is_written_without_onnxruntime(tmp_path, monkeypatch):
    there = module_under_test.find_spec
    monkeypatch.setattr(module_under_test, "find_spec", lambda name: None if name == "onnxruntime" else there(name))
    model = plain_clip()
    export_towers(model, tmp_path, "onnx", 32)
    check_programs(model, tmp_path, 32)
