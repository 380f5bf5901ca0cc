"""Towers as exported programs have the features of the model for any batch size."""

import functools
import json
import logging
import shutil
import warnings
from collections import Counter

import onnx
import onnxruntime
import open_clip
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from support.methods.towers import PLAIN, SIZE, batch, features, plain_clip, smallest_cosine, trained
from vlightning.common.errors import UserError
from vlightning.lightning_modules.core import programs as module_under_test
from vlightning.lightning_modules.networks.clip.programs import export_towers

SUFFIXES = {"torch_export": "pt2", "onnx": "onnx"}
PREPROCESSING = {"mean": (0.0, 0.1, 0.2), "interpolation": "bicubic"}


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


def check_programs(model, folder, size):
    """Compare files with their model on batch sizes that were neither traced nor checked."""
    programs = load(folder)
    for count in (1, 5):
        inputs = batch(model, count, size)
        for found, right in zip(programs(*inputs), features(model, *inputs), strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
            if count > 1:  # far more than the tolerance lies between any two rows
                assert float(torch.pdist(right).min()) > 1e-2


@pytest.fixture
def export_silently(capfd, recwarn):
    """Return a function that exports a model, and fails if anything is printed or warned of."""

    def export(*args, **kwargs):
        capfd.readouterr()
        recwarn.clear()
        files = export_towers(*args, **kwargs)
        assert capfd.readouterr() == ("", "")
        assert not recwarn.list
        return files

    return export


def check_tokenizer(file, length):
    """Compare with open_clip's tokenizer, of which no library for phones knows."""
    texts = ["a red circle", "", "Hello,  World's END!", "circle " * 100]
    ids = [text.ids for text in Tokenizer.from_file(str(file)).encode_batch(texts)]
    assert torch.equal(torch.tensor(ids), open_clip.get_tokenizer("ViT-B-32", context_length=length)(texts))


# MobileCLIP-tiny has the operations of S0.
@pytest.mark.slow
@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("name", ["MobileCLIP-S0", "MobileCLIP-B"])
def test_programs_equal_the_model_for_any_batch_size(name, format, tmp_path, export_silently):
    model = trained(name)
    files = export_silently(model, tmp_path / "new" / "export", format, SIZE)
    suffix = SUFFIXES[format]
    assert [file.name for file in files] == ["config.json", f"image.{suffix}", f"text.{suffix}", "tokenizer.json"]
    assert all(file.exists() for file in files)
    check_programs(model, tmp_path / "new" / "export", SIZE)
    assert [norms(file) for file in files[1:3]] == [0, 0]
    check_tokenizer(tmp_path / "new" / "export" / "tokenizer.json", model.context_length)


def check_that_differing_programs_are_not_written(written, format, folder, monkeypatch):
    """Export a model whose text tower differs from the one in the written files, with these as its programs."""
    folder.mkdir()
    model = plain_clip()
    with torch.no_grad():
        model.positional_embedding.mul_(1.01)
    monkeypatch.setattr(module_under_test, "_write", lambda part, path, target: shutil.copy(written / path.name, path))
    with pytest.raises(UserError, match=r"the exported text tower, got .*-0.* on a batch of 1"):
        export_towers(model, folder / "export", format, 32)
    assert list(folder.iterdir()) == []


def test_programs_of_open_clips_class_are_compared(tmp_path, export_silently, monkeypatch):
    model, folder = plain_clip(), tmp_path / "written"
    export_silently(model, folder, "torch_export", 32)
    check_programs(model, folder, 32)
    check_that_differing_programs_are_not_written(folder, "torch_export", tmp_path / "other", monkeypatch)


@pytest.mark.slow
def test_onnx_is_written_without_onnxruntime_described_by_its_configuration_and_compared_with_it(
    tmp_path, export_silently, monkeypatch
):
    model, folder = plain_clip(), tmp_path / "written"
    there = module_under_test.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(module_under_test, "find_spec", lambda name: None if name == "onnxruntime" else there(name))
        export_silently(model, folder, "onnx", 32, preprocessing=PREPROCESSING)
    check_programs(model, folder, 32)
    check_configuration(folder)
    check_that_differing_programs_are_not_written(folder, "onnx", tmp_path / "other", monkeypatch)


def check_configuration(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["towers"]["image"] == {
        "file": "image.onnx",
        "inputs": [{"name": "image", "shape": ["batch", 3, 32, 32], "dtype": "float32"}],
        "output": {"name": "image_features", "shape": ["batch", 24], "dtype": "float32"},
    }
    assert config["preprocessing"] == {"mean": [0.0, 0.1, 0.2], "interpolation": "bicubic"}
    assert (config["class"], config["dtype"], config["fused"], config["normalize"], config["context_length"]) == (
        ("CLIP", "float32", True, True, 16)
    )
    assert config["versions"]["torch"] == torch.__version__.split("+")[0]
    for name, tower in config["towers"].items():  # what the files themselves say
        session = onnxruntime.InferenceSession(folder / tower["file"])
        (given,), (taken,) = session.get_inputs(), session.get_outputs()
        assert (given.name, given.shape) == (tower["inputs"][0]["name"], tower["inputs"][0]["shape"])
        assert (taken.name, taken.shape) == (tower["output"]["name"], tower["output"]["shape"])
        assert taken.name == f"{name}_features"


@pytest.mark.slow
def test_norms_stay_without_reparameterization(tmp_path):
    model = trained("MobileCLIP-S0")
    export_towers(model, tmp_path, "torch_export", SIZE, fused=False, normalize=False)
    assert norms(tmp_path / "image.pt2") > 10
    assert norms(tmp_path / "text.pt2") > 2
    inputs = batch(model, 4)
    for found, right in zip(load(tmp_path)(*inputs), features(model, *inputs, normalize=False), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found.norm(dim=1), torch.ones(4), atol=0.01)


@pytest.mark.parametrize(("format", "dtype"), [("onnx", torch.float16), ("torch_export", torch.bfloat16)])
def test_half_precision_programs_take_float32_images(format, dtype, tmp_path):
    model = plain_clip()
    export_towers(model, tmp_path, format, 32, dtype=dtype)
    inputs = batch(model, 5, 32)
    for found, right in zip(load(tmp_path)(*inputs), features(model, *inputs), strict=True):
        assert found.dtype == dtype
        assert smallest_cosine(found, right) > 0.9995
    said = json.loads((tmp_path / "config.json").read_text())["towers"]["image"]
    assert (said["inputs"][0]["dtype"], said["output"]["dtype"]) == ("float32", str(dtype).removeprefix("torch."))


def test_half_precision_programs_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test, "_write", lambda part, path, target: path.touch())
    monkeypatch.setattr(module_under_test, "_load", lambda path: lambda *inputs: torch.randn(len(inputs[0]), 24))
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
        (
            {"format": "tflite"},
            UserError,
            r"Expected the format torch_export or onnx or .* or executorch, got 'tflite'",
        ),
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
