"""Captions in files: all images once, in order, with names, for any number of processes."""

import pyarrow.parquet as pq
import pytest
import torch
from lightning import LightningModule, Trainer

from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import CaptionWriter, gather_texts, rank
from vlightning.callbacks.writers.rows import gather_rows
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule

IMAGES = 11


class Predicts(LightningModule):
    """Returns functions of the image's number."""

    def predict_step(self, batch, batch_idx):
        index = batch["sample_index"]
        texts = ["é" * number for number in index.tolist()]  # the first is empty
        return {
            "sample_index": index,
            "image_id": batch["image_id"],
            "caption": texts,
        }


def data():
    return ShapesDataModule(eval_length=IMAGES, eval_batch_size=3, image_size=8, seed=0, tokenizer="clip", **CLIP)


CLIP = {"vocab_size": 49408, "max_tokens": 77, "num_workers": 0}


def predict(folder, make=lambda **options: Trainer(accelerator="cpu", logger=False, **options)):
    make(callbacks=[CaptionWriter(str(folder))], enable_progress_bar=False).predict(Predicts(), data())


def predict_on_rank(folder):
    predict(folder, lambda **options: rank_trainer("ddp", **options))


def test_captions_are_written_in_the_order_of_the_data(tmp_path):
    predict(tmp_path)
    rows = pq.read_table(tmp_path / "captions.parquet").to_pylist()
    assert [row["caption"] for row in rows] == ["é" * number for number in range(IMAGES)]


def test_two_processes_write_the_file_of_one(tmp_path):
    predict(tmp_path / "one")
    run_distributed(predict_on_rank, tmp_path / "two")
    one, two = (pq.read_table(tmp_path / name / "captions.parquet") for name in ("one", "two"))
    assert one.equals(two)
    assert one.num_rows == IMAGES


def test_other_outputs_are_refused(tmp_path):
    class Other(Predicts):
        def predict_step(self, batch, batch_idx):
            return {"sample_index": batch["sample_index"]}

    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[CaptionWriter(str(tmp_path))])
    with pytest.raises(UserError, match="sample_index, image_id and caption from predict_step of Other, which"):
        trainer.predict(Other(), data())


def rows_of_rank():
    numbers, wide = torch.zeros(0, dtype=torch.long), torch.zeros(0, 1)
    some = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    batches = [[], some][rank()]
    return gather_rows(batches, wide), gather_rows([part[:, 0].long() for part in batches], numbers)


def test_a_process_without_a_batch_has_rows_of_the_others_width():
    expected = (torch.arange(1.0, 7).reshape(3, 2), torch.tensor([1, 3, 5]))
    for found in run_distributed(rows_of_rank):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert gather_rows([], torch.zeros(0, 1)).shape == (0, 1)


def texts_of_rank():
    texts = [["één", "", "two words"], []][rank()]
    return gather_texts(texts), gather_texts([]), gather_texts(["", "a"][: 1 + rank()])


def test_texts_of_all_processes_are_gathered():
    expected = (["één", "", "two words"], [], ["", "", "a"])
    assert run_distributed(texts_of_rank) == [expected, expected]
    assert gather_texts(["a", ""]) == ["a", ""]
