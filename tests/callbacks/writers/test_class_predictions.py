"""Predicted classes in a file: all images once, in order, with names."""

import pyarrow.parquet as pq
import pytest
import torch
from lightning import LightningModule, Trainer

from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import ClassPredictionWriter
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule

SIDE, IMAGES = 8, 11


class ByBrightness(LightningModule):
    """Probabilities that are a function of the image."""

    def predict_step(self, batch, batch_idx):
        scores = batch["image"].flatten(1)[:, :40] + torch.arange(40) / 1000  # no two alike
        return {"sample_index": batch["sample_index"], "probabilities": scores.softmax(1)}


def data():
    return ShapeClassesDataModule(eval_length=IMAGES, eval_batch_size=3, image_size=SIDE, seed=0)


def predict(folder, make=lambda **options: Trainer(accelerator="cpu", logger=False, **options)):
    trainer = make(callbacks=[ClassPredictionWriter(3, str(folder))], enable_progress_bar=False)
    trainer.predict(ByBrightness(), data())


def predict_on_rank(folder):
    predict(folder, lambda **options: rank_trainer("ddp", **options))


def test_the_file_contains_the_best_classes_of_each_image(tmp_path):
    predict(tmp_path)
    rows = pq.read_table(tmp_path / "predictions.parquet").to_pylist()
    assert [row["sample_index"] for row in rows] == list(range(IMAGES))
    module = data()
    module.setup("predict")
    batch = {name: torch.cat([b[name] for b in module.predict_dataloader()]) for name in ("image", "sample_index")}
    expected = ByBrightness().predict_step(batch, 0)["probabilities"]
    for row, probabilities in zip(rows, expected, strict=True):
        values, labels = probabilities.sort(descending=True)
        assert row["label"] == labels[0]
        assert row["name"] == module.class_names[labels[0]]
        assert row["image"] == f"shape image {row['sample_index']}"
        assert row["probability"] == pytest.approx(values[0].item())
        assert row["top_labels"] == labels[:3].tolist()
        assert row["top_probabilities"] == pytest.approx(values[:3].tolist())
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.parquet"]


def test_two_processes_write_the_file_of_one(tmp_path):
    predict(tmp_path / "one")
    run_distributed(predict_on_rank, tmp_path / "two")
    one, two = (pq.read_table(tmp_path / name / "predictions.parquet") for name in ("one", "two"))
    assert one.equals(two)


def test_other_outputs_are_refused(tmp_path):
    class Other(ByBrightness):
        def predict_step(self, batch, batch_idx):
            return batch["image"]

    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[ClassPredictionWriter(3, str(tmp_path))], enable_progress_bar=False
    )
    with pytest.raises(UserError, match="Expected sample_index and probabilities from predict_step of Other"):
        trainer.predict(Other(), data())
    with pytest.raises(UserError, match=r"Expected top_k .* of at least 1, got 0"):
        ClassPredictionWriter(0)


def test_a_trial_run_writes_nothing(tmp_path):
    predict(tmp_path, lambda **options: Trainer(accelerator="cpu", logger=False, fast_dev_run=1, **options))
    assert not list(tmp_path.iterdir())


def test_non_finite_probabilities_come_last_and_are_null(tmp_path):
    class Overflowing(ByBrightness):
        def predict_step(self, batch, batch_idx):
            found = super().predict_step(batch, batch_idx)
            found["probabilities"][:, 3] = torch.nan
            found["probabilities"][batch["sample_index"] == 4] = torch.nan
            return found

    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ClassPredictionWriter(40, str(tmp_path))])
    trainer.predict(Overflowing(), data())
    rows = pq.read_table(tmp_path / "predictions.parquet").to_pylist()
    for row in rows:
        missing = 40 if row["sample_index"] == 4 else 1
        assert row["top_labels"].count(None) == row["top_probabilities"].count(None) == missing
        assert row["top_labels"][-1] is None
        assert 3 not in row["top_labels"]
        assert row["label"] == row["top_labels"][0]
    assert (rows[4]["label"], rows[4]["name"], rows[4]["probability"]) == (None, None, None)
