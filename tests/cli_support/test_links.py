"""What data and module share is set on the data."""

from pathlib import Path

import pytest
import torch

from support.command_line import run, tiny_config


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


def fit(*words: str):
    return run("fit", "--config=tiny.yaml", *words)


def vocab_size(version: int = 0) -> int:
    path = f"runs/tiny/version_{version}/checkpoints/last.ckpt"
    return torch.load(path, weights_only=True)["hyper_parameters"]["vocab_size"]


def test_the_module_takes_the_datas_value_typed_or_default():
    assert fit("--data.vocab_size=33").status == 0
    assert vocab_size() == 33
    assert fit().status == 0
    assert vocab_size(1) == 10


def test_the_same_value_on_both_sides_is_fine():
    assert fit("--data.vocab_size=33", "--model.vocab_size=33").status == 0


def test_a_differing_value_on_the_modules_side_is_one_sentence(tmp_path: Path):
    assert "set data.init_args.vocab_size only" in fit("--model.vocab_size=34", "--data.vocab_size=33").sentence
    tiny_config(tmp_path, "more.yaml", "model: {init_args: {vocab_size: 34}}")
    assert "more.yaml" in fit("--config=more.yaml").sentence


def test_a_module_without_the_argument_is_left_alone():
    assert fit("--model=NoVocabularyModel", "--data.vocab_size=33").status == 0
