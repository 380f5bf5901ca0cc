import csv
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlightning.common.errors import UserError
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.grounding.rows import read_columns
from vlightning.datamodules.questions.rows import read_questions
from vlightning.datamodules.reading.lists import read_items
from vlightning.datamodules.reading.parquet import column_names
from vlightning.datamodules.tasks.rows import Annotations

PIECES = ["a", "ü", ".", ",", ";", "\t", '"', '""', "\n", "\r", "\r\n", " "]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def rows_in(path):
    """The rows by column, and the causes of bad rows."""
    rows = []
    for read in read_items(str(path)):
        try:
            rows.append(read())
        except BadSample as bad:
            rows.append(bad.fault.cause)
    return rows


def images(rows):
    return [row if isinstance(row, str) else row["image"] for row in rows]


@settings(max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    captions=st.lists(TEXT, min_size=1, max_size=4),
    columns=st.permutations(["image", "caption", "title"]),
    delimiter=st.sampled_from(",;\t"),
    # With "\n" the module writes a lone "\r" without quotation marks, unless it writes them around all fields.
    style=st.sampled_from([("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL), ("\n", csv.QUOTE_ALL)]),
)
def test_a_table_of_pythons_csv_module_is_read_back_row_for_row(tmp_path_factory, captions, columns, delimiter, style):
    rows = [{"image": f"{number}.png", "caption": text, "title": text[::-1]} for number, text in enumerate(captions)]
    content = io.StringIO(newline="")
    writer = csv.DictWriter(content, columns, delimiter=delimiter, lineterminator=style[0], quoting=style[1])
    writer.writeheader()
    writer.writerows(rows)
    path = tmp_path_factory.getbasetemp() / "table.csv"
    path.write_text(content.getvalue(), encoding="utf-8", newline="")
    assert rows_in(path) == rows


@pytest.mark.parametrize(
    "opened",
    [
        {1: '"5 inch screen'},  # open until the end of the file
        {1: '"5 inch screen', 3: '"another one'},
        {1: '"5 inch screen', 3: 'a screen of 20"'},  # the second mark closes the first
        {1: '"5 inch screen', 2: 'a screen of 20"'},
        {4: '"5 inch screen'},  # the last row
        {0: '"', 1: '"'},
        {1: '"a, b', 2: '"c"'},
    ],
)
@pytest.mark.parametrize("columns", ["image,caption", "caption,image", "id,caption,image", "image,caption,id"])
def test_an_unclosed_quotation_mark_costs_its_own_row_only(tmp_path, opened, columns):
    names = columns.split(",")
    rows = [{"image": f"{number}.png", "caption": opened.get(number, "red"), "id": str(number)} for number in range(5)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join([columns, *(",".join(row[name] for name in names) for row in rows)]) + "\n")
    unclosed = {number for number, text in opened.items() if text.startswith('"') and not text.endswith('"')}
    if '"' in opened.values():
        unclosed = set(opened)
    assert images(rows_in(path)) == [
        "unclosed quotation mark" if number in unclosed else f"{number}.png" for number in range(5)
    ]


def test_a_caption_longer_than_the_library_reads_costs_its_own_row_only(tmp_path):
    lines = [f"{number}.png,{'x' * 200_000 if number == 1 else 'red'}" for number in range(4)]
    (tmp_path / "table.csv").write_text("\n".join(["image,caption", *lines]))
    assert images(rows_in(tmp_path / "table.csv")) == ["0.png", "invalid CSV", "2.png", "3.png"]
    many = "\n".join(f"{number}.png,red" for number in range(20_000))  # more than the library reads in a field
    (tmp_path / "table.csv").write_text('image,caption\nfirst.png,"5 inch\n' + many)
    assert images(rows_in(tmp_path / "table.csv")) == [
        "unclosed quotation mark",
        *(f"{number}.png" for number in range(20_000)),
    ]


@pytest.mark.parametrize(
    ("header", "named"),
    [("image,caption,caption", "got 'caption' 2 times"), ('image,"caption', r"got 'image,\"caption' \(unclosed")],
)
def test_a_header_that_names_no_columns_or_one_twice_is_refused(tmp_path, header, named):
    (tmp_path / "table.csv").write_text(f"{header}\n0.png,red,blue\n")
    with pytest.raises(UserError, match=named):
        rows_in(tmp_path / "table.csv")


def test_empty_columns_of_a_spreadsheet_are_ignored(tmp_path):
    (tmp_path / "table.csv").write_text("image,caption,,\n0.png,red,,\n")
    assert images(rows_in(tmp_path / "table.csv")) == ["0.png"]


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_an_object_with_a_key_twice_is_a_bad_row(tmp_path, ending):
    objects = ['{"image": "0.png", "caption": "x", "caption": "red"}', '{"image": "1.png", "caption": "blue"}']
    path = tmp_path / f"rows.{ending}"
    path.write_text("\n".join(objects) if ending == "jsonl" else f"[{', '.join(objects)}]")
    assert images(rows_in(path)) == ["duplicate key 'caption'", "1.png"]


def _questions(path):
    return list(read_questions([path], ("image", "caption", None), {}, {}, ("", False)))


def _annotations(path):
    return Annotations(("image",), ("image",), "caption", {}, None).open(path, "train")


@pytest.mark.parametrize("read", [column_names, _annotations, _questions, lambda path: list(read_columns(path))])
def test_a_parquet_file_that_names_a_column_twice_is_refused(tmp_path, read):
    path = tmp_path / "rows.parquet"
    text = pa.array(["0.png"])
    pq.write_table(pa.Table.from_arrays([text, text, text], ["image", "caption", "caption"]), path)
    with pytest.raises(UserError, match=r"different names of columns in .*got 'caption' 2 times"):
        read(str(path))
