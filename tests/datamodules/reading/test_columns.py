"""What a table computes by columns, compared with a loop over its rows."""

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlightning.common.errors import UserError
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.labels.rows import LabelTable
from vlightning.datamodules.pairs.rows import CaptionRows
from vlightning.datamodules.reading import cache
from vlightning.datamodules.reading.cache import cached_rows
from vlightning.datamodules.reading.layout import FAULT, RECORD, Layout, record_batches
from vlightning.datamodules.reading.table import SPACES, PairTable, positions_of

many_tables = settings(
    max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
NOT_UTF8 = pa.array([b"one", b"\xff", None, b"two", b"one"]).view(pa.string())
IDS = st.sampled_from(
    [
        (pa.string(), ["1", "01", "", " ", "\u3000", "k", None]),
        (pa.large_string(), ["1", "k", None]),
        (pa.int64(), [1, 2, -5, None]),
        (pa.uint64(), [1, 2**64 - 1, None]),
        (pa.float64(), [1.0, 1.5, 0.0, -0.0, float("nan"), float("inf"), None]),
        (pa.bool_(), [True, False, None]),
        (pa.date32(), [1, 2, None]),
        (pa.null(), [None]),
    ]
)
PATHS = ["a.png", "/data/a.png", "b.png", "sub/../a.png", "s3://bucket/a.png", "", None]


@st.composite
def sources(draw):
    """Return a table in memory with its layout."""
    lengths = [draw(st.integers(1, 8)), draw(st.integers(0, 3))]
    kind, ids = draw(IDS)

    def column(values, kind):
        return pa.chunked_array(
            [pa.array([draw(st.sampled_from(values)) for _ in range(count)], kind) for count in lengths]
        )

    image = column(PATHS, pa.string())
    if draw(st.booleans()):
        values = [{"bytes": data, "path": path} for data in (None, b"content") for path in PATHS[:3]]
        image = column([*values, None], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    captions = column(["one", "two", None], pa.string())
    if draw(st.booleans()):
        captions = column([["one"], ["two", None, "three"], [], None], pa.list_(pa.string()))
    faults = column([None, None, "no image"], pa.string())
    table = pa.table({"image": image, "caption": captions, "image_id": column(ids, kind), FAULT: faults})
    layout = Layout(
        "source",
        "image",
        "caption",
        draw(st.sampled_from(["image_id", "image_id", None])),
        draw(st.sampled_from(["/data", "s3://bucket"])),
        fault=draw(st.sampled_from([FAULT, None])),
        needs_id=draw(st.booleans()),
    )
    return datasets.Dataset(table), layout


def images_by_rows(table):
    groups = {}
    for row in range(len(table)):
        try:
            key = "image", table.image_id(row)
        except BadSample:
            key = "row", row
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def texts_by_rows(table):
    texts = []
    for row in range(len(table)):
        try:
            texts += table.captions(row)
        except BadSample:
            continue
    return texts


@many_tables
@given(st.lists(sources(), min_size=1, max_size=3))
def test_images_and_texts_of_a_table_are_those_of_its_rows(drawn):
    table = PairTable(drawn, 10**8)
    assert table.images() == images_by_rows(table)
    assert list(table.texts()) == texts_by_rows(table)
    captions = CaptionRows(table)
    of_image = [
        [row for row in range(len(captions)) if captions.image_row(row) == image] for image in range(len(table))
    ]
    assert captions.images() == [[row for image in group for row in of_image[image]] for group in table.images()]


def test_a_text_that_is_not_utf8_costs_its_row_only():
    ids = pa.table({"image": ["a", "b", "c", "d", "e"], "caption": NOT_UTF8, "image_id": NOT_UTF8})
    table = PairTable([(datasets.Dataset(ids), Layout("source", "image", "caption", "image_id", "/data"))], 10**8)
    assert list(table.texts()) == ["one", "two", "one"]
    assert table.images() == images_by_rows(table) == [[0, 4], [1], [2], [3]]
    labels = LabelTable([(datasets.Dataset(ids), Layout("source", "image", "caption", None, "/data"))], 10**8)
    assert labels.class_names() == ("one", "two")
    labels.set_class_indices(("one", "two"), 2, "train")
    assert [labels.label(row) for row in (0, 3, 4)] == [0, 1, 0]
    with pytest.raises(BadSample, match=r"unreadable \(UnicodeDecodeError\)"):
        labels.label(1)
    with pytest.raises(BadSample, match="no label"):
        labels.label(2)


def test_labels_are_read_once_for_each_different_value():
    values = [["cat"], ["3"], [], ["dog", "cat"], None, [" cat "], [""]]
    table = pa.table({"image": ["a"] * 7, "caption": pa.array(values, pa.list_(pa.string()))})
    labels = LabelTable([(datasets.Dataset(table), Layout("source", "image", "caption", None, "/data"))] * 2, 10**8)
    assert [labels.raw_label(row) for row in range(14)] == ["cat", 3, None, None, None, "cat", None] * 2
    with pytest.raises(UserError, match=r"got the integer 3 in source, row 1 and the name 'cat' in source, row 0:"):
        labels.class_names()
    with pytest.raises(UserError, match=r"Expected a label from 0 to 2, got 3 in source, row 1 \(train split\)"):
        labels.set_class_indices(["bird", "cat"], 3, "train")
    labels.set_class_indices(["bird", "cat"], 4, "train")
    assert [labels.label(row) for row in (0, 1, 5, 12)] == [1, 3, 1, 1]
    with pytest.raises(BadSample, match="several labels"):
        labels.label(3)


def test_positions_are_grouped_in_the_order_of_the_first_ones():
    assert positions_of(np.array([5, -1, 5, 2, -2, 2])) == [[0, 2], [1], [3, 5], [4]]
    assert positions_of(np.zeros(0, np.int64)) == []


def test_ids_of_spaces_are_the_texts_that_python_strips():
    assert set(SPACES) == {character for character in map(chr, range(0x110000)) if character.isspace()}


# The Arrow file of the rows


def test_rows_are_converted_once_for_a_key(tmp_path):
    made = []

    def make():
        made.append(1)
        return record_batches([{"image": {"bytes": None, "path": "a.png"}, "caption": ["one"]}] * 1500)

    keys = (["old"], ["old"], ["new"])
    data = [cached_rows(make, RECORD, key, str(tmp_path), "pairs.json", "train") for key in keys]
    assert len(made) == 2
    assert [len(rows) for rows in data] == [1500] * 3
    assert data[0][1499]["caption"] == ["one"]
    assert len(list(tmp_path.rglob("*.arrow"))) == 2


def test_a_source_without_rows_and_a_reader_that_fails_leave_no_file(tmp_path):
    def failing():
        yield from record_batches([{"image": {"bytes": None, "path": "a.png"}, "caption": []}])
        raise UserError("Expected a list")

    with pytest.raises(UserError, match=r"Expected rows in the train split \('pairs.json'\), got none"):
        cached_rows(list, RECORD, 0, str(tmp_path), "pairs.json", "train")
    with pytest.raises(UserError, match="Expected a list"):
        cached_rows(failing, RECORD, 0, str(tmp_path), "pairs.json", "train")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_long_conversion_shows_its_rows_per_second(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(cache, "SHOWN_AFTER", 0.0)
    datasets.enable_progress_bars()
    batches = record_batches([{"image": {"bytes": None, "path": "a.png"}, "caption": []}] * 10)
    with caplog.at_level("INFO", logger=cache.__name__):
        cached_rows(lambda: batches, RECORD, 0, str(tmp_path), "pairs.json", "train")
    assert "Reading pairs.json: " in (error := capsys.readouterr().err)
    assert "rows/s" in error
    assert "Read 10 rows of pairs.json in " in caplog.text
