"""Captioning reads a store in place of the Parquet file of `predict`."""

import pytest
import torch

from support.data.colors import read_table, write_colors
from support.methods.captioning import write_language_model
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.datamodules import EmbeddedCaptionsDataModule


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = write_colors(tmp_path_factory.mktemp("captions"))
    write_language_model(folder / "gpt2")
    words = ["--shard_size=7", "--num_workers=0", "--accelerator=cpu", f"--data.train={folder}/pairs.csv"]
    for name, more in (("plain", []), ("views", ["--views=2"])):
        ran = run("embed", f"local-dir:{folder}/model", f"--output={folder}/{name}", *words, *more)
        assert ran.status == 0, ran.err
    ran = run(
        *("predict", "--model=ImageEmbeddingModule", f"--model.weights={folder}/model", "--data=ImageTextDataModule"),
        *(f"--data.predict={folder}/pairs.csv", "--data.num_workers=0", "--data.image_size=32"),
        *("--data.tokenizer=clip", "--data.vocab_size=49408", "--data.max_tokens=8"),
        *("--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.default_root_dir={folder}/run"),
    )
    assert ran.status == 0, ran.err
    return folder


def data_of(files, embeddings):
    data = EmbeddedCaptionsDataModule(
        str(embeddings), train=f"{files}/pairs.csv", language_model=f"{files}/gpt2", batch_size=8
    )
    data.setup("fit")
    return data


def test_batches_are_those_of_the_file_of_a_prediction(files):
    (parquet,) = (files / "run").glob("**/embeddings.parquet")
    one, other = data_of(files, parquet), data_of(files, files / "plain")
    batches = list(zip(one.train_dataloader(), other.train_dataloader(), strict=True))
    assert len(batches) == len(read_table(files / "pairs.csv")) // 8
    for written, stored in batches:
        assert torch.equal(written["sample_index"], stored["sample_index"])
        assert torch.equal(written["input_ids"], stored["input_ids"])
        torch.testing.assert_close(written["embedding"], stored["embedding"], atol=1e-5, rtol=1e-5)
    assert one.tower["sha256"] == other.tower["sha256"]  # a mapper that was trained on one goes on with the other
    assert other.tower.keys() == {"model", "weights", "sha256"}


def test_a_file_of_a_prediction_is_not_searched(files):
    (parquet,) = (files / "run").glob("**/embeddings.parquet")
    assert "Expected a store that `vlightning embed` wrote" in run("search", parquet, "dark").sentence


def test_augmented_views_are_refused(files):
    with pytest.raises(UserError, match="2 augmented views of each image: embed the images without --views"):
        data_of(files, files / "views")
