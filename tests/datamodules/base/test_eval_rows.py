"""`limit_eval_rows`, and the warning on evaluated labels that are unlike those of the split."""

import json
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from support.data.images import draw_image
from support.methods.tiny import ImageModel
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.datamodules import (
    ImageClassificationDataModule,
    ImageTextDataModule,
    ShapesDataModule,
)
from vlightning.datamodules.base.eval_rows import drawn_evenly, evaluated_items, furthest_label

CLASSES, EACH = ["ape", "bee", "cat"], 16


class LabelRecorder(ImageModel):
    """Keeps the labels that it is evaluated on."""

    seen: ClassVar[list[int]] = []

    def validation_step(self, batch, batch_idx):
        self.seen.extend(batch["label"].tolist())

    def test_step(self, batch, batch_idx):
        self.seen.extend(batch["label"].tolist())


@pytest.fixture
def by_class(tmp_path):
    """A list of images, sorted by class."""
    draw_image(0).save(tmp_path / "0.png")
    rows = [{"image": "0.png", "label": name} for name in CLASSES for _ in range(EACH)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return str(tmp_path / "rows.json")


def words(command, source, *others):
    data = {"train": source, "validation": source, "test": source, "image_size": 8, "batch_size": 8, "num_workers": 0}
    trainer = ("accelerator=cpu", "enable_progress_bar=false", "enable_model_summary=false", "logger=false")
    short = (
        "--trainer.max_steps=1",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.val_check_interval=1",
        "--checkpoint.save_top_k=0",
    )
    return (
        command,
        f"--model={__name__}.LabelRecorder",
        "--data=ImageClassificationDataModule",
        *(f"--data.{name}={value}" for name, value in data.items()),
        *(f"--trainer.{option}" for option in trainer),
        *(short if command == "fit" else ()),
        *others,
    )


@pytest.mark.parametrize(("command", "option"), [("fit", "val"), ("validate", "val"), ("test", "test")])
def test_batches_of_one_class_are_named_in_one_line(tmp_path, monkeypatch, by_class, command, option):
    monkeypatch.chdir(tmp_path)
    LabelRecorder.seen.clear()
    split = "test" if command == "test" else "validation"
    expected = (
        f"The {split} reads 16 labels, of which 100% are 'ape', and 33% in the whole split: replace "
        f"trainer.limit_{option}_batches by data.limit_eval_rows, which draws evenly."
    )
    with pytest.warns(UserWarning, match=expected):
        ran = run(*words(command, by_class, f"--trainer.limit_{option}_batches=2"))
    assert ran.status == 0, ran.err
    assert LabelRecorder.seen == [0] * 16


@pytest.mark.parametrize(
    ("command", "limit", "each"),
    [
        ("validate", "12", 4),
        ("test", "12", 4),
        ("validate", "0.5", 8),
        ("validate", "1.0", 16),
        ("validate", "100", 16),
    ],
)
@pytest.mark.filterwarnings("error:.*draws evenly")
def test_a_limit_of_rows_draws_each_class_in_proportion(tmp_path, monkeypatch, by_class, command, limit, each):
    monkeypatch.chdir(tmp_path)
    LabelRecorder.seen.clear()
    ran = run(*words(command, by_class, f"--data.limit_eval_rows={limit}"))
    assert ran.status == 0, ran.err
    assert Counter(LabelRecorder.seen) == {0: each, 1: each, 2: each}


@pytest.mark.parametrize("limit", ["0", "-1", "0.0", "1.5", "half"])
def test_another_limit_is_refused(tmp_path, monkeypatch, by_class, limit):
    monkeypatch.chdir(tmp_path)
    assert "limit_eval_rows" in run(*words("validate", by_class, f"--data.limit_eval_rows={limit}")).sentence


def test_all_data_are_read_for_features_and_prediction(by_class):
    data = ImageClassificationDataModule(
        by_class, by_class, predict=by_class, limit_eval_rows=6, image_size=8, num_workers=0
    )
    data.setup("fit")
    assert sum(len(batch["label"]) for batch in data.every_image("validation")) == 3 * EACH
    data.setup("predict")
    assert sum(len(batch["sample_index"]) for batch in data.predict_dataloader()) == 3 * EACH


def test_processes_read_disjoint_parts_of_the_same_rows(monkeypatch, by_class):
    rows = []
    for rank in range(2):
        data = ImageClassificationDataModule(by_class, by_class, limit_eval_rows=9, image_size=8, num_workers=0)
        monkeypatch.setattr(data, "replicas", lambda rank=rank: (2, rank))
        data.setup("fit")
        rows += [row for batch in data.val_dataloader() for row in batch["sample_index"].tolist()]
    assert rows == drawn_evenly(48, 9, [0] * 16 + [1] * 16 + [2] * 16).tolist()
    assert [row // EACH for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_images_of_pairs_are_spaced_evenly_and_keep_all_captions(tmp_path):
    for number in range(12):
        draw_image(number).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "caption": ["one", "two"]} for number in range(12)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    options = {"image_size": 8, "num_workers": 0, "vocab_size": 120, "batch_size": 4}
    sources = dict.fromkeys(("train", "validation"), str(tmp_path / "rows.json"))
    data = ImageTextDataModule(**sources, limit_eval_rows=4, **options)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    assert batch["sample_index"].tolist() == [1, 4, 7, 10]
    assert len(batch["input_ids"]) == 8
    assert len(data.train_dataloader()) == 3
    with pytest.raises(UserError, match=r"Expected no data.limit_eval_rows with data.streaming"):
        ImageTextDataModule(train=str(tmp_path), streaming=True, samples_per_epoch=4, limit_eval_rows=4)


def test_drawn_shapes_are_limited_too():
    data = ShapesDataModule(length=8, eval_length=10, limit_eval_rows=0.3, image_size=16, num_workers=0)
    data.setup("fit")
    assert [batch["sample_index"].tolist() for batch in data.val_dataloader()] == [[1, 5, 8]]


def test_a_split_of_one_class_is_named(tmp_path, by_class):
    one = tmp_path / "one.json"
    one.write_text(json.dumps([{"image": "0.png", "label": "bee"}] * 8))
    data = ImageClassificationDataModule(by_class, str(one), image_size=8, num_workers=0)
    data.setup("fit")
    with pytest.warns(UserWarning, match="All 8 labels of the validation split are 'bee': accuracies say little"):
        data.val_dataloader()


@pytest.mark.parametrize("limit", [1, 2, 7, 10, 50, 99, 0.001, 0.25, 0.999])
@pytest.mark.parametrize("classes", [None, 1, 3, 10, 100])
def test_a_draw_is_without_repetition_and_within_one_of_each_share(limit, classes):
    labels = None if classes is None else np.random.default_rng(0).integers(classes, size=100).tolist()
    drawn = drawn_evenly(100, limit, labels)
    count = limit if isinstance(limit, int) else int(np.ceil(100 * limit))
    assert len(drawn) == len(set(drawn.tolist())) == count
    assert drawn.tolist() == sorted(drawn.tolist())
    for label, number in Counter(labels or []).items():
        assert abs(sum(labels[place] == label for place in drawn) - number * count / 100) < 1
    if labels is None:
        assert len(set(np.diff(drawn).tolist())) <= 2


@pytest.mark.parametrize(
    "shares", [[0.5, 0.5], [0.9, 0.1], [0.99, 0.01], [0.1] * 10, [0.001] * 1000, [0.7, *[0.003] * 100]]
)
@pytest.mark.parametrize("count", [8, 30, 100, 1000])
def test_random_draws_are_like_the_split_and_the_first_rows_of_a_sorted_one_are_not(shares, count):
    labels = np.repeat(np.arange(len(shares)), (np.array(shares) * 10_000).astype(int))
    draws = np.random.default_rng(0)
    named = [furthest_label(labels, draws.choice(labels, count, replace=False)) for _ in range(200)]
    assert sum(label is not None for label in named) <= 2
    if shares[0] ** count < 0.01:
        assert furthest_label(labels, labels[:count]) == 0


@pytest.mark.parametrize(
    ("limit", "items"), [(1, [0, 1, 5, 6]), (0.5, [0, 1, 5, 6]), (1.0, list(range(10))), (9, None)]
)
def test_the_items_under_a_limit_of_batches_are_those_of_all_processes(limit, items):
    assert evaluated_items(10, 2, 2, limit).tolist() == (list(range(10)) if items is None else items)
