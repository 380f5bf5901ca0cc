"""Datamodules of images with a text and a label: the public annotation files, tables of one's own, and drawn shapes."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from support.data.images import draw_image, encoded
from vlightning.common.errors import UserError
from vlightning.common.tokenizers import tokenizer_from_json
from vlightning.datamodules import (
    EntailmentDataModule,
    NLVR2DataModule,
    ShapesEntailmentDataModule,
    ShapesNLVR2DataModule,
)
from vlightning.datamodules.text.tokenizers import train_wordpiece

TEXTS = ["A man, sleeping.", "a Dog", "two (2) cats", "a man"]


class Noise(nn.Module):
    """Pixels that depend on random draws."""

    def forward(self, image):
        return torch.rand(3, 4, 4)


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        draw_image(number).save(tmp_path / f"{number}.jpg")
    tokenizer_from_json(train_wordpiece(TEXTS * 3, 300)).save_pretrained(tmp_path / "words")
    return tmp_path


def _data(kind, folder, rows, **options):
    path = folder / rows if isinstance(rows, str) else folder / "rows.json"
    if not isinstance(rows, str):
        path.write_text(json.dumps(rows))
    options = {"num_workers": 0, "batch_size": 2, "image_size": 32, "vocab_size": 300} | options
    sources = dict.fromkeys(("train", "validation", "test", "predict"), str(path))
    return kind(**sources, cache_dir=str(folder / "cache"), **options)


def _rows(data, split="validation"):
    data.setup({"validation": "validate"}.get(split, split))
    loader = getattr(data, {"validation": "val"}.get(split, split) + "_dataloader")()
    return list(loader)


def test_snli_ves_files_are_read_as_they_are(folder):
    rows = [
        {"image": str(number), "sentence": text, "label": label}
        for number, (text, label) in enumerate(zip(TEXTS, ["neutral", "entailment", "contradiction", 2], strict=True))
    ]
    data = _data(EntailmentDataModule, folder, rows)
    data.setup("fit")
    batches = list(data.val_dataloader())
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [1, 2, 0, 2]
    assert {tuple(batch["image"].shape) for batch in batches} == {(2, 3, 32, 32)}
    tokenizer, ids = data.tokenizer, batches[0]["input_ids"][0].tolist()
    assert ids[0] == tokenizer.cls_token_id
    assert tokenizer.sep_token_id not in ids
    assert tokenizer.decode(ids[1:]) == "a man sleeping"  # cleaned
    assert [len(batch["label"]) for batch in data.train_dataloader()] == [2, 2]
    assert data.text("validation", 1) == "a Dog"
    assert data.images("validation", 1)[0].size == draw_image(1).size
    assert data.image_name("validation", 1) == str(folder / "1.jpg")


def test_texts_are_not_truncated_but_for_thirty_words(folder):
    rows = [{"image": "0", "sentence": "man " * 40, "label": 0}] * 2
    assert _rows(_data(EntailmentDataModule, folder, rows))[0]["input_ids"].shape[1] == 31


@pytest.mark.parametrize("form", ["authors", "csv", "parquet"])
def test_pairs_are_read_from_the_authors_file_and_from_tables(folder, form):
    pairs, labels = [("0.jpg", "1.jpg"), ("2.jpg", "3.jpg")], ["True", "False"]
    if form == "authors":
        name = [
            {"images": list(pair), "sentence": text, "label": label}
            for pair, text, label in zip(pairs, TEXTS, labels, strict=False)
        ]
    elif form == "csv":
        name = "rows.csv"
        lines = [f"{left},{right},{text},{label}" for (left, right), text, label in zip(pairs, ["a", "b"], [1, 0])]  # noqa: B905
        (folder / name).write_text("\n".join(["image_left,image_right,sentence,label", *lines]))
    else:
        name = "rows.parquet"
        images = [[encoded(draw_image(2 * row + place), "PNG") for row in range(2)] for place in range(2)]
        table = {"image_left": images[0], "image_right": images[1], "sentence": ["a", "b"], "label": [True, False]}
        pq.write_table(pa.table(table), folder / name)
    data = _data(NLVR2DataModule, folder, name)
    (batch,) = _rows(data)
    assert batch["label"].tolist() == [1, 0]
    for place, image in enumerate(("image_left", "image_right")):
        expected = torch.stack([data.eval_transform(draw_image(2 * row + place)) for row in range(2)])
        assert (batch[image] - expected).abs().mean() < 0.1  # JPEG
    assert [image.size for image in data.images("validation", 1)] == [draw_image(2).size] * 2


def test_images_of_a_pair_are_augmented_independently_and_the_same_in_every_run(folder):
    rows = [{"images": ["0.jpg", "0.jpg"], "sentence": "a", "label": "True"}] * 4
    runs = []
    for _ in range(2):
        data = _data(NLVR2DataModule, folder, rows, train_transform=Noise(), seed=3)
        data.setup("fit")
        runs.append(list(data.train_dataloader()))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first["image_left"], second["image_left"])
        assert not torch.equal(first["image_left"], first["image_right"])


def test_bad_rows_are_replaced_in_training_and_skipped_in_evaluation(folder, caplog):
    good = {"image": "0", "sentence": "a man", "label": "neutral"}
    rows = [good, good | {"image": "missing"}, good | {"sentence": "..."}, good | {"label": None}, good, "no object"]
    data = _data(EntailmentDataModule, folder, rows, max_bad_share=1.0)
    data.setup("fit")
    assert sum(len(batch["label"]) for batch in data.val_dataloader()) == 2
    assert sum(len(batch["label"]) for batch in data.train_dataloader()) == 6
    for cause in ("missing file", "empty caption", "no label", "no object"):
        assert cause in caplog.text
    pair = {"images": ["0.jpg"], "sentence": "a", "label": "True"}
    rows = [pair, pair | {"images": ["0.jpg", "1.jpg"]}]
    assert len(_rows(_data(NLVR2DataModule, folder, rows, max_bad_share=1.0))[0]["label"]) == 1
    assert "1 images instead of 2" in caplog.text


def test_prediction_needs_no_labels(folder):
    data = _data(EntailmentDataModule, folder, [{"image": "0", "sentence": "a man"}] * 3, tokenizer=f"{folder}/words")
    batches = _rows(data, "predict")
    assert sum(len(batch["image"]) for batch in batches) == 3
    assert "label" not in batches[0]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"label": "neutrul"}, {}, "of which 'neutral' is the nearest"),
        ({"label": 3}, {}, "a label from 0 to 2"),
        ({}, {"text_column": "sentense"}, "set data.text_column to 'sentence'"),
        ({}, {"image_columns": ["photo"]}, "set data.image_columns"),
        ({}, {"label_column": "gold"}, "set data.label_column"),
    ],
)
def test_errors_name_what_to_correct(folder, row, options, message):
    rows = [{"image": "0", "sentence": "a man", "label": "neutral"} | row]
    with pytest.raises(UserError, match=message):
        _data(EntailmentDataModule, folder, rows, **options).setup("fit")


def test_other_files_are_refused(folder):
    with pytest.raises(UserError, match=r"Expected \.json, .* got .* of the format imagefolder"):
        EntailmentDataModule(train=str(folder / "0.jpg")).setup("fit")


# Drawn shapes


def test_entailed_captions_are_those_of_the_image_and_contradicted_ones_differ_in_a_visible_object():
    data = ShapesEntailmentDataModule(length=600, eval_length=200)
    data.setup("fit")
    rows, counts = data._rows["train"], Counter()
    for row in range(600):
        judged = rows.judged(row)
        pairs = list(zip(judged.scene[:2], judged.caption[:2], strict=True))
        wrong = [place for place, (drawn, said) in enumerate(pairs) if drawn != said]
        counts[judged.label, judged.covered is None] += 1
        assert judged.scene.relation == judged.caption.relation
        if judged.label == 0:
            assert len(wrong) == 1
            assert wrong[0] != judged.covered
            drawn, said = pairs[wrong[0]]
            assert sum(one != other for one, other in zip(drawn, said, strict=True)) == 1
        else:
            assert not wrong
            assert (judged.label == 1) == (judged.covered is not None)
    assert counts.keys() == {(0, True), (0, False), (1, False), (2, True)}
    for label in range(3):
        assert sum(count for (own, _), count in counts.items() if own == label) == pytest.approx(200, abs=50)
    first, second = (torch.tensor(list(image.getdata())) for image in (rows.image(0), rows.image(0)))
    assert torch.equal(first, second)


def test_statements_about_pairs_are_true_of_the_drawn_objects():
    data = ShapesNLVR2DataModule(length=400, eval_length=20)
    data.setup("fit")
    rows, labels = data._rows["train"], Counter()
    for row in range(400):
        compared = rows.compared(row)
        words = compared.statement.split()
        shown = [
            any((thing.color, thing.shape) == (words[1], words[2]) for thing in scene[:2])
            for scene in (compared.left, compared.right)
        ]
        where = {"left": shown[0], "right": shown[1], "images": all(shown)}
        assert compared.label == where[next(word for word in where if word in words[4:])]
        labels[compared.label] += 1
    assert labels[1] == pytest.approx(200, abs=50)
