"""Answers of `predict`: one row for each question in any order of batches, and the form of the challenge's server."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import torch

from vlightning.callbacks import AnswerWriter


def outputs(rows):
    return {
        "sample_index": torch.tensor(rows),
        "question": [f"what is {row}?" for row in rows],
        "question_id": [str(1000 + row) if row else "first" for row in rows],
        "answers": [[f"best {row}", "other"] for row in rows],
        "probabilities": torch.tensor([[0.5 + row / 10, 0.1] for row in rows]),
    }


def test_answers_are_written_in_the_order_of_the_data(tmp_path):
    trainer = SimpleNamespace(
        is_global_zero=True, fast_dev_run=False, default_root_dir=str(tmp_path), datamodule=SimpleNamespace()
    )
    writer = AnswerWriter()
    writer.on_predict_epoch_start(trainer, None)
    for rows in ([3, 1], [2], [0]):
        writer.on_predict_batch_end(trainer, None, outputs(rows), None, 0)
    writer.on_predict_epoch_end(trainer, None)
    table = pq.read_table(tmp_path / "predictions" / "answers.parquet").to_pydict()
    assert table["sample_index"] == [0, 1, 2, 3]
    assert table["question"] == [f"what is {row}?" for row in range(4)]
    assert table["answer"] == [f"best {row}" for row in range(4)]
    assert table["top_answers"] == [[f"best {row}", "other"] for row in range(4)]
    torch.testing.assert_close(torch.tensor(table["top_probabilities"]), outputs([0, 1, 2, 3])["probabilities"])
    assert table["probability"] == [row[0] for row in table["top_probabilities"]]
    server = json.loads((tmp_path / "predictions" / "answers.json").read_text())
    ids = ["first", 1001, 1002, 1003]
    assert server == [{"question_id": number, "answer": f"best {row}"} for row, number in enumerate(ids)]
