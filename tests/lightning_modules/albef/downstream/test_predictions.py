"""Predictions as a Parquet file, and figures of an evaluation's samples."""

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from support.methods.tasks import task_and_data
from support.methods.tiny_modules import trainer
from vlightning.callbacks import PredictionFigures


@pytest.mark.parametrize("name", ["entailment", "nlvr"])
def test_predict_writes_the_class_of_each_sample(name, tmp_path):
    module, data = task_and_data(name, 0, batch_size=4, num_workers=0)
    found = trainer(default_root_dir=tmp_path).predict(module, data)
    table = pq.read_table(tmp_path / "predictions/predictions.parquet").to_pylist()
    probabilities = torch.cat([batch["probabilities"] for batch in found])
    assert [row["sample_index"] for row in table] == list(range(10))
    assert [row["label"] for row in table] == probabilities.argmax(1).tolist()
    assert [row["name"] for row in table] == [data.class_names[row["label"]] for row in table]


def test_figures_show_the_images_of_a_sample_with_text_label_and_prediction(tmp_path, monkeypatch):
    module, data = task_and_data("nlvr", 0, batch_size=4, num_workers=0)
    figures, drawn = PredictionFigures(samples=3), []
    monkeypatch.setattr("vlightning.callbacks.figures.evaluation.draw_rows", drawn.append)
    logger = TensorBoardLogger(tmp_path)
    monkeypatch.setattr(logger.experiment, "add_figure", lambda name, *_: drawn.append(name))
    trainer(figures, logger=logger, default_root_dir=tmp_path).validate(module, data)
    rows, name = drawn
    assert name == "val/predictions"
    result = module.evaluation.result
    assert result.sample_index.tolist() == list(range(10))
    for row, index in zip(rows, (0, 4, 9), strict=True):
        label, predicted = int(result.label[index]), int(result.probabilities[index].argmax())
        assert (row.text, row.note) == (data.text("validation", index), f"label: {data.class_names[label]}")
        assert [panel.right for panel in row.panels] == [label == predicted] * 2
        assert row.panels[0].title.startswith(data.class_names[predicted])
        assert [panel.image for panel in row.panels] == data.images("validation", index)
