"""The file of a learngene: a round trip in both precisions, and errors in one sentence."""

import dataclasses
import json
import math
import os
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support.methods.learngene import SIZES, learngene
from vlightning.callbacks.learngene import layers
from vlightning.callbacks.learngene.file import load_learngene, save_learngene
from vlightning.callbacks.learngene.layers import rule_of
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.common.errors import UserError


def test_a_written_learngene_is_read_back(tmp_path):
    written = learngene()
    save_learngene(written, tmp_path / "new" / "learngene.safetensors")
    read = load_learngene(tmp_path / "new" / "learngene.safetensors")
    assert dataclasses.replace(read, tensors={}) == dataclasses.replace(written, tensors={})
    assert read.tensors.keys() == written.tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in written.tensors.items())
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["learngene.safetensors"]


def test_manifest_describes_the_extraction(tmp_path):
    save_learngene(learngene(), tmp_path / "a", "float16")
    with safe_open(tmp_path / "a", "pt") as file:
        manifest = json.loads(file.metadata()["learngene"])
    assert manifest == {
        "version": 2,
        "method": "MM-LG",
        "rule": "vlightning.lightning_modules.mmlg.rules",
        "sizes": vars(SIZES),
        "teacher": {"name": "T", "weights": "w", "sha256": "0"},
        "data": {"class": "Data"},
        "step": 7,
        "storage": "float16",
        "preprocessing": None,
    }


@pytest.mark.parametrize(
    ("method", "count"),
    # The auxiliary; with two blocks a tower, norms included; three layers a tower.
    [("MM-LG", 30_311_065), ("TLEG", 26_768_257), ("He-LG", 10_646_784)],
)
def test_number_of_stored_values_of_each_method(method, count):
    assert sum(math.prod(shape) for shape in rule_of(method).shapes(LearngeneSizes()).values()) == count


@pytest.mark.parametrize("method", ["TLEG", "He-LG"])
def test_files_of_other_methods_are_read_back(tmp_path, method):
    tensors = {name: torch.randn(shape) for name, shape in rule_of(method).shapes(SIZES).items()}
    save_learngene(dataclasses.replace(learngene(), tensors=tensors, method=method), tmp_path / "a")
    read = load_learngene(tmp_path / "a")
    assert read.method == method
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(UserError, match="missing"):
        save_learngene(dataclasses.replace(read, method="MM-LG"), tmp_path / "b")


def test_half_storage_rounds_matrices_only(tmp_path):
    written = learngene()
    save_learngene(written, tmp_path / "whole")
    save_learngene(written, tmp_path / "half", "float16")
    stored, read = load_file(tmp_path / "half"), load_learngene(tmp_path / "half").tensors
    for name, tensor in written.tensors.items():
        matrix = tensor.dim() > 1
        assert stored[name].dtype == (torch.float16 if matrix else torch.float32), name
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], tensor.half().float() if matrix else tensor), name
    assert (tmp_path / "half").stat().st_size < 0.75 * (tmp_path / "whole").stat().st_size


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    save_learngene(learngene(0), tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    large = learngene(1)
    large.tensors["text.text_projection"][0, 0] = 1e6
    with pytest.raises(UserError, match=r"got non-finite values in text.text_projection"):
        save_learngene(large, tmp_path / "a", "float16")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"could not be written .*; what was there before is unchanged"):
        save_learngene(learngene(1), tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_reading_imports_the_rule_that_the_file_names(tmp_path, monkeypatch):
    save_learngene(learngene(), tmp_path / "a")
    monkeypatch.setattr(layers, "_RULES", {})
    monkeypatch.delitem(sys.modules, "vlightning.lightning_modules.mmlg.rules")
    with pytest.raises(UserError, match="got one of 'MM-LG': import the module that registers its rule"):
        rule_of("MM-LG")
    assert load_learngene(tmp_path / "a").method == "MM-LG"
    with pytest.raises(UserError, match="got one of 'other'"):
        rule_of("other", "json.tool")
    assert "json.tool" not in sys.modules


def test_the_newest_file_of_the_runs_of_a_name_is_read(tmp_path):
    with pytest.raises(UserError, match=r"found none at .*run"):
        load_learngene(tmp_path / "run")
    for step, seconds in ((1, 10), (2, 30), (3, 20)):
        path = tmp_path / f"run/version_{step}/learngene.safetensors"
        save_learngene(dataclasses.replace(learngene(), step=step), path)
        os.utime(path, (seconds, seconds))
    assert load_learngene(tmp_path / "run").step == 2
    assert load_learngene(tmp_path / "run/version_3").step == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"found none at .*empty"):
        load_learngene(tmp_path / "empty")


def test_a_folder_is_not_overwritten(tmp_path):
    with pytest.raises(UserError, match="got the folder"):
        save_learngene(learngene(), tmp_path)


def test_tensors_of_other_sizes_are_refused_with_one_sentence(tmp_path):
    def changed(change):
        broken = learngene()
        change(broken.tensors)
        return broken

    broken = changed(lambda tensors: tensors.pop("blocks.text.2.fc1.bias"))
    with pytest.raises(UserError, match=r"Expected the tensors of its .* got 1 missing \(blocks.text.2.fc1.bias\)"):
        save_learngene(broken, tmp_path / "a")
    save_learngene(learngene(), tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "a")
    tensors["coefficients.text"] = torch.zeros(5)
    tensors["more"] = torch.zeros(5)
    save_file(tensors, tmp_path / "a", metadata)
    message = r"1 unknown \(more\) and 1 of another shape \(coefficients.text \[5\] instead of \[6\]\)"
    with pytest.raises(UserError, match=message):
        load_learngene(tmp_path / "a")


def test_files_of_another_kind_are_refused_with_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"Expected a learngene file .* found none"):
        load_learngene(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"no safetensors at all")
    with pytest.raises(UserError, match="cannot be read"):
        load_learngene(tmp_path / "a")
    save_file({"a": torch.zeros(1)}, tmp_path / "a", {"format": "pt"})
    with pytest.raises(UserError, match="without a learngene's manifest"):
        load_learngene(tmp_path / "a")
    save_file({"a": torch.zeros(1)}, tmp_path / "a", {"learngene": '{"version": 1}'})
    with pytest.raises(UserError, match="Expected version 2 of the learngene format, got version 1"):
        load_learngene(tmp_path / "a")
