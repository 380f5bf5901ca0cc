"""Texts with boxes: RefCOCO's public layout, tables of one's own, and bad rows."""

import json
import pickle

import datasets
import numpy as np
import pytest
import torch

from support.data.images import draw_image, encoded
from support.data.refcoco import ANNOTATED, write_refcoco
from vlightning.common.errors import UserError
from vlightning.datamodules import GroundingDataModule, GroundingShapesDataModule

OPTIONS = {"num_workers": 0, "batch_size": 4, "image_size": 16, "vocab_size": 300}


def _rows(data, split="test"):
    data.setup({"validation": "validate"}.get(split, split))
    loader = data.val_dataloader() if split == "validation" else getattr(data, f"{split}_dataloader")()
    batches = list(loader)
    return {
        name: [value for batch in batches for value in batch[name]]
        for name in ("sample_index", "boxes", "right_box", "size", "part", "ref_id")
    }


@pytest.fixture
def refcoco(tmp_path):
    write_refcoco(tmp_path / "data", tmp_path / "coco", texts=lambda number: f"the w{number} thing")
    folder = tmp_path / "data"
    return {
        "train": str(folder / "refcoco+_train.json"),
        "validation": str(folder / "refcoco+_val.json"),
        "test": str(folder / "refcoco+_test.json"),
        "refer": str(folder / "refcoco+"),
        "image_root": str(tmp_path / "coco"),
        "cache_dir": str(tmp_path / "cache"),
    } | OPTIONS


def test_the_public_layout_of_refcoco(refcoco, tmp_path):
    data = GroundingDataModule(**refcoco, proposals=str(tmp_path / "data/refcoco+/dets.json"))
    found = _rows(data)
    assert set(found["part"]) == {"testA", "testB"}
    proposals = json.loads((tmp_path / "data/refcoco+/dets.json").read_text())
    for place, ref_id in enumerate(found["ref_id"]):
        ref = ANNOTATED[int(ref_id)]
        assert found["right_box"][place].tolist() == pytest.approx(ref["bbox"])
        assert found["boxes"][place].tolist() == [pytest.approx(box[:4]) for box in proposals[str(ref["image_id"])]]
        assert found["part"][place] == ref["split"]
    assert [size.tolist() for size in found["size"]] == [[32, 40]] * len(found["size"])
    assert set(_rows(data, "validation")["part"]) == {"val"}
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (4, 3, 16, 16)
    assert not {"boxes", "right_box"} & batch.keys()


def test_texts_of_one_image_have_the_id_of_its_file(refcoco):
    data = GroundingDataModule(**refcoco)
    data.setup("fit")
    rows = data._opened("train")
    ids = {rows.image_name(row): rows.image_id(row) for row in range(len(rows))}
    assert len(set(ids.values())) == len(ids) < len(rows)
    assert all(rows.image_id(row) == ids[rows.image_name(row)] for row in range(len(rows)))


def test_without_proposals_the_candidates_are_the_annotated_boxes(refcoco):
    found = _rows(GroundingDataModule(**refcoco))
    for boxes, right in zip(found["boxes"], found["right_box"], strict=True):
        assert any(torch.allclose(box, right) for box in boxes)


def test_training_resizes_the_whole_image(refcoco):
    transform = GroundingDataModule(**refcoco, horizontal_flip=False, rand_augment=False).default_train_transform()
    plain = GroundingDataModule(**refcoco).default_eval_transform()
    torch.testing.assert_close(transform(draw_image(3)), plain(draw_image(3)))
    assert GroundingDataModule(**refcoco).default_train_transform().flip.p == 0.5


class _Harmful:
    def __reduce__(self):
        return print, ("run by the file",)


def test_a_pickled_file_runs_no_code(refcoco, tmp_path, capsys):
    refs = tmp_path / "data/refcoco+/refs(unc).p"
    refs.write_bytes(pickle.dumps([_Harmful()], protocol=2))
    with pytest.raises(UserError, match=r"Expected RefCOCO's annotations .* names \w+.print"):
        GroundingDataModule(**refcoco).setup("test")
    assert "run by the file" not in capsys.readouterr().out


def test_an_unknown_reference_is_a_bad_row(refcoco, tmp_path, caplog):
    file = tmp_path / "data/refcoco+_test.json"
    items = json.loads(file.read_text())
    file.write_text(json.dumps([items[0] | {"ref_id": 99_999}, {"image": items[0]["image"], "text": "w"}, *items[1:]]))
    found = _rows(GroundingDataModule(**refcoco, max_bad_share=0.9))
    assert found["sample_index"][0] == 2
    assert caplog.text.count("(unknown ref_id)") == 2
    assert "(99999)" in caplog.text


def test_missing_annotations_are_named(refcoco, tmp_path):
    (tmp_path / "data/refcoco+/instances.json").unlink()
    with pytest.raises(UserError, match=r"Expected RefCOCO's file .*instances.json', got none: correct data.refer"):
        GroundingDataModule(**refcoco).setup("test")


# Tables of one's own

BOXES = [[1, 2, 10, 12], [20, 5, 8.5, 9]]


def _table(tmp_path, items, kind="json"):
    (tmp_path / "images").mkdir(exist_ok=True)
    for number in range(3):
        draw_image(number).save(tmp_path / f"images/{number}.png")
    path = tmp_path / f"own.{kind}"
    if kind == "json":
        path.write_text(json.dumps(items))
    elif kind == "csv":
        lines = [f'{row["image"]},{row["text"]},"{json.dumps(row["boxes"])}"' for row in items]
        path.write_text("\n".join(["image,text,boxes", *lines]))
    else:
        rows = [row | {"image": encoded(draw_image(number))} for number, row in enumerate(items)]
        datasets.Dataset.from_list(rows).to_parquet(path)
    return GroundingDataModule(
        train=str(path), test=str(path), predict=str(path), cache_dir=str(tmp_path / "cache"), **OPTIONS
    )


def _row(number, **values):
    return {"image": f"images/{number}.png", "text": "the thing", "boxes": BOXES} | values


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_the_first_box_of_a_table_is_the_right_one(tmp_path, kind):
    found = _rows(_table(tmp_path, [_row(0), _row(1)], kind))
    assert [boxes.tolist() for boxes in found["boxes"]] == [BOXES, BOXES]
    assert [box.tolist() for box in found["right_box"]] == [BOXES[0]] * 2
    assert found["part"] == ["", ""]


def test_a_column_box_is_the_right_one_and_proposals_replace_the_candidates(tmp_path):
    data = _table(tmp_path, [_row(0, box=BOXES[1]), _row(1, box=BOXES[1])])
    assert [box.tolist() for box in _rows(data)["right_box"]] == [BOXES[1]] * 2
    proposals = tmp_path / "proposals.json"
    proposals.write_text(json.dumps({"images/0.png": [[0, 0, 5, 5, 0.9, 17]]}))
    with_file = GroundingDataModule(**data.hparams | {"proposals": str(proposals), "max_bad_share": 0.9})
    found = _rows(with_file)
    assert [boxes.tolist() for boxes in found["boxes"]] == [[[0, 0, 5, 5]]]  # the other image has none
    assert found["right_box"][0].tolist() == BOXES[1]


BAD = {
    "no boxes": {"boxes": []},
    "box outside the image": {"boxes": [[1, 2, 10, 12], [20, 5, 31, 30]]},  # two corners
    "invalid box": {"boxes": [[1, 2, 10]]},
    "invalid box ": {"boxes": [[1, 2, -10, 5]]},
    "invalid box  ": {"boxes": "nonsense"},
    "missing file": {"image": "images/none.png"},
    "empty caption": {"text": " "},
}


def test_bad_rows_are_skipped_and_counted_by_cause(tmp_path, caplog):
    data = _table(tmp_path, [_row(0)] + [_row(1, **values) for values in BAD.values()] + [_row(2)])
    data.max_bad_share = 0.9
    found = _rows(data)
    assert [int(index) for index in found["sample_index"]] == [0, len(BAD) + 1]
    for cause in BAD:
        assert f"({cause.strip()})" in caplog.text, cause
    assert "in 40 x 32 pixels; boxes are x, y, width, height" in caplog.text


def test_a_box_may_leave_the_image_by_a_rounded_pixel(tmp_path):
    found = _rows(_table(tmp_path, [_row(0, boxes=[[-0.4, 0, 41, 32.6]])]))
    assert len(found["boxes"]) == 1


def test_a_split_without_usable_boxes_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Expected texts with boxes in the test split .*no boxes: 2.*data.proposals"):
        _table(tmp_path, [_row(0, boxes=[]), _row(1, boxes=[])]).setup("test")


def test_prediction_needs_candidates_and_no_right_box(tmp_path):
    found = _rows(_table(tmp_path, [_row(0), _row(1)]), "predict")
    assert [boxes.tolist() for boxes in found["boxes"]] == [BOXES, BOXES]


def test_an_empty_batch_has_every_entry(tmp_path):
    data = _table(tmp_path, [_row(0)])
    data.setup("test")
    data.evaluation_set(data._opened("test"), [], "test")
    batch, *_ = data.evaluation_collate("test")([])
    full = next(iter(data.test_dataloader()))
    assert batch.keys() == full.keys()
    assert batch["input_ids"].shape[0] == 0 < batch["input_ids"].shape[1]
    assert {len(value) for value in batch.values()} == {0}


# Drawn shapes


def test_drawn_boxes_enclose_the_named_object_and_others_are_empty():
    data = GroundingShapesDataModule(length=4, eval_length=6, image_size=64)
    data.setup("test")
    rows = data._opened("test")
    assert len(rows) == 12
    for row in range(len(rows)):
        image = torch.from_numpy(np.array(rows.image(row))).float()
        grey = image[0, 0]
        target = rows.target(row)
        assert target.right == target.boxes[row % 2]
        assert rows.captions(row) == [str(rows.scene(row // 2)[row % 2])]
        drawn = (image - grey).abs().amax(2) > 40
        inside = []
        for left, top, wide, high in target.boxes:
            box = drawn[int(top) : int(top + high) + 1, int(left) : int(left + wide) + 1]
            inside.append(int(box.sum()))
        assert inside[0] + inside[1] >= 0.98 * int(drawn.sum())
        assert min(inside[:2]) > 15


def test_training_draws_the_phrase_of_either_object():
    data = GroundingShapesDataModule(length=4, eval_length=6, image_size=64)
    data.setup("fit")
    rows = data._opened("train")
    assert rows.captions(2) == [str(thing) for thing in rows.scene(2)[:2]]
