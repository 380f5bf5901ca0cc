"""Lists read in blocks, compared with the same files read row by row."""

import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlightning.common.errors import UserError
from vlightning.datamodules.reading import blocks, csv_rows
from vlightning.datamodules.reading.blocks import first_keys, read_list_batches
from vlightning.datamodules.reading.layout import FAULT
from vlightning.datamodules.reading.lists import listed, read_list

many_files = settings(
    max_examples=250, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
PIECES = [
    "a",
    "é",
    "🙂",
    '"',
    "\\",
    "}, {",
    "},{",
    "]",
    "[",
    ",",
    "\n",
    "\r\n",
    "\u2028",
    "\x85",
    "\ufeff",
    " ",
    "\ud800",
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
NUMBER = st.sampled_from([0, -7, 5.0, 1.5, -0.0, 1e300, float("nan"), float("inf"), 2**70, True])
VALUE = st.one_of(TEXT, st.none(), NUMBER, st.lists(st.one_of(TEXT, st.none(), NUMBER), max_size=3))
NESTED = st.one_of(VALUE, st.dictionaries(TEXT, VALUE, max_size=2), st.lists(st.lists(VALUE, max_size=2), max_size=2))
USUAL = st.fixed_dictionaries({"image": TEXT}, optional={"caption": VALUE, "image_id": st.one_of(TEXT, NUMBER)})
ROW = st.one_of(
    USUAL.map(json.dumps),
    USUAL.filter(lambda row: "\\ud800" not in json.dumps(row)).map(lambda row: json.dumps(row, ensure_ascii=False)),
    st.dictionaries(st.sampled_from(["image", "caption", "image_id", "other"]), NESTED).map(json.dumps),
    st.sampled_from(
        [
            '{"image": "a.png", "caption": "twice", "image": "b.png"}',
            '{"image": "a.png", "caption": [{"x": 1, "x": 2}]}',
            f'{{"image": "a.png", "caption": "digits", "image_id": {"9" * 4300}}}',
            f'{{"image": "a.png", "caption": "digits", "image_id": {"9" * 5000}}}',
            f'{{"image": "a.png", "other": {"[" * 3000}{"]" * 3000}}}',
            '{"image": "a.png", "caption": "raw\ttab"}',
            '{"image": "a.png"} {"image": "b.png"}',
            '{"image": "a.png"}, {"image": "b.png"}',
            '{"image": "a.png", "caption": [1',
            '2]}, {"image": "b.png"}',
            "12",
            "null",
            "-Infinity",
            '"a text"',
            "[]",
            "{}",
            "{",
            "",
            "\x0b",
            "\x00",
        ]
    ),
)


@st.composite
def damaged(draw, content):
    """Return the bytes of a text, whole or with a fault at a random place."""
    data = draw(st.sampled_from(["", "\ufeff", "\ufeff\ufeff", "\n "])).encode() + content.encode(errors="replace")
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(start + 6, len(data))))
    return draw(
        st.sampled_from(
            [data, data, data, data[:start], data[:start] + b"\xff" + data[stop:], data[:start] + data[stop:]]
        )
    )


@st.composite
def json_list(draw):
    rows = draw(st.lists(ROW, max_size=6))
    between = draw(st.sampled_from([",", ", ", " ,\n", "\r\n,\t"]))
    content = draw(st.sampled_from(["[", "[", "[ \n", "", "{"])) + between.join(rows)
    return draw(damaged(content + draw(st.sampled_from(["]", "]", "]\n", " ]", ",]", "] x", "]]", ""]))))


@st.composite
def json_lines(draw):
    rows = draw(st.lists(st.tuples(ROW, st.sampled_from(["\n", "\n", "\r\n", "\n\n", " \n", "\n\ufeff"])), max_size=6))
    return draw(damaged("".join(row + end for row, end in rows)))


@st.composite
def csv_table(draw):
    header = draw(
        st.sampled_from(["image,caption", "caption,image_id,image", "image;caption", "a,,,image", "", "image"])
    )
    fields = [",", ",", ";", '"', '""', "a", "é", "\n", "\n", "\r\n", "\r", "1.png", "2.png", " ", "\x00"]
    body = st.lists(st.sampled_from(fields), max_size=30).map("".join)
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(draw(st.lists(st.lists(TEXT.map(_encodable), max_size=4), max_size=4)))
    return draw(damaged(header + draw(st.sampled_from(["\n", "\r\n"])) + draw(body) + "\n" + stream.getvalue()))


def _encodable(text):
    return text.replace("\ud800", "")


def outcome(read):
    """Return the records, or the error."""
    try:
        return list(read())
    except UserError as error:
        return str(error)


def assert_alike(path, image_id=None):
    arguments = ([str(path)], "image", "caption", image_id)
    in_blocks = outcome(lambda: (row for batch in read_list_batches(*arguments) for row in batch.to_pylist()))
    assert in_blocks == outcome(lambda: read_list(*arguments))


@pytest.mark.parametrize(("ending", "files"), [("json", json_list()), ("jsonl", json_lines()), ("csv", csv_table())])
def test_broken_files_give_the_same_rows_and_causes_in_blocks_as_row_by_row(ending, files, tmp_path, monkeypatch):
    path = tmp_path / f"list.{ending}"

    @many_files
    @given(files, st.integers(1, 80), st.integers(1, 4), st.sampled_from([None, "other"]))
    def compare(content, size, lines, image_id):
        monkeypatch.setattr(blocks, "BLOCK", size)
        monkeypatch.setattr(csv_rows, "LINES", lines)
        path.write_bytes(content)
        assert_alike(path, image_id)

    compare()


def test_a_block_with_a_fault_is_read_row_by_row_and_the_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 300)
    rows = [{"image": f"{number}.png", "caption": "a dog"} for number in range(40)]
    rows[25] = {"caption": "without an image"}
    read = []
    monkeypatch.setattr(blocks, "listed", lambda item, *names: read.append(item) or listed(item, *names))
    for ending in ("json", "jsonl"):
        path = tmp_path / f"list.{ending}"
        path.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows))
        batches = list(read_list_batches([str(path)], "image", "caption", None))
        causes = [row[FAULT] for batch in batches for row in batch.to_pylist()]
        assert causes == [None] * 25 + ["no image"] + [None] * 14
        assert rows[25] in read
        assert 0 < len(read) < 20
        read.clear()


def test_the_keys_of_the_first_object_are_read_from_the_first_block(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('[1, "text", {"caption": "a dog", "image": "a.png"}, {"other": 1}]')
    assert first_keys(str(path)) == ["caption", "image"]
    path.write_text("[]")
    assert first_keys(str(path)) == []
