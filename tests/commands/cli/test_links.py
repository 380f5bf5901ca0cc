"""What data and module share is set on the data."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from lightning import Trainer
from PIL import Image

from support.methods.methods import METHODS
from support.runs.command_line import run, tiny_config


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


@pytest.mark.parametrize(
    ("name", "options"), [("albef", {"append_sep": False, "clean_captions": True}), ("mobileclip", {})]
)
def test_another_class_of_data_encodes_texts_as_the_data_of_the_checkpoint(name: str, options: dict, tmp_path: Path):
    method = METHODS[name]
    module, data = method.build(method.prepare(tmp_path), seed=3, batch_size=8, num_workers=0, **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(**quiet, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint("last.ckpt")
    content = torch.load("last.ckpt", weights_only=True)
    for section, value in (("hyper_parameters", module), ("datamodule_hyper_parameters", data)):
        content[section]["_class_path"] = type(value).__name__  # as the command line writes it
    torch.save(content, "last.ckpt")
    texts = ["a large RED circle", "it's green!"]
    Path("texts.txt").write_text("\n".join(texts))
    Path("images").mkdir()
    Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 60).convert("RGB").save("images/0.png")
    asked = (
        f"--model={type(module).__name__}",
        "--data=ImageTextDataModule",
        "--data.predict=images/",
        "--data.predict_texts=texts.txt",
    )
    ran = run("predict", "--ckpt_path=last.ckpt", *asked, "--trainer.accelerator=cpu")
    assert ran.status == 0, ran.err
    (written,) = Path().rglob("text_embeddings.parquet")
    found = torch.tensor(pq.read_table(written)["embedding"].to_pylist())
    with torch.no_grad():
        expected = module.eval().encode_texts(**data.encoder()(texts))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
