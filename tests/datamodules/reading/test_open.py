import io
import json
import pickle
import re
import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from support.data.images import draw_image, encoded
from vlightning.common.errors import UserError
from vlightning.common.hub import hub_is_reachable
from vlightning.common.tokenizers import open_tokenizer
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.reading.layout import FAULT, identity_number
from vlightning.datamodules.reading.lists import read_list
from vlightning.datamodules.reading.open import Opening
from vlightning.datamodules.reading.resolve import Source
from vlightning.datamodules.reading.table import PairTable
from vlightning.datamodules.text.captions import text_id


@pytest.fixture
def table(tmp_path):
    def make(*sources, split="train", **options):
        defaults = {
            "image_root": None,
            "image_column": "image",
            "caption_column": "caption",
            "image_id_column": None,
            "cache_dir": str(tmp_path / "cache"),
        }
        opening = Opening(**{**defaults, **options})
        return PairTable([opening.open(source, split) for source in sources], max_pixels=10**6)

    return make


def shown(table, row):
    """Number of the image in a row."""
    found = np.asarray(table.image(row)).astype(int)
    return min(range(20), key=lambda number: np.abs(np.asarray(draw_image(number)).astype(int) - found).sum())


def test_parquet_with_embedded_images(files, table):
    rows = table(files.parquet(5))
    assert len(rows) == 5
    assert [shown(rows, row) for row in range(5)] == list(range(5))
    assert rows.captions(3) == ["image number 3"]
    assert rows.images() == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("test[:2]", "Unknown split"),
        ("train[:x]", "Unrecognized instruction format"),
        ("train[:300%]", "boundaries"),
        ("train[9:10]", "no data"),
    ],
)
def test_rows_of_parquet_that_do_not_exist_are_named(files, table, split, reason):
    source = files.parquet(5)
    assert len(table(Source(str(source), split="train[1:4]"))) == 3
    with pytest.raises(
        UserError, match=rf"Expected rows of the split train, .* got {re.escape(repr(split))} .*{reason}"
    ):
        table(Source(str(source), split=split))


def test_albef_json_mixes_strings_and_lists_and_paths(files, table):
    paths = files.images(3)
    items = [
        {"image": paths[0], "caption": "one"},
        {"image": str(files.folder / paths[1]), "caption": ["two", "deux"]},
        {"image": paths[2], "caption": []},
    ]
    rows = table(files.json(items))
    assert [shown(rows, row) for row in range(3)] == [0, 1, 2]
    assert [rows.captions(row) for row in range(3)] == [["one"], ["two", "deux"], []]
    assert list(rows.texts()) == ["one", "two", "deux"]


def test_json_lines_and_csv_and_other_column_names(files, table, tmp_path):
    paths = files.images(2)
    lines = files.json([{"file": path, "title": "a title"} for path in paths], "pairs.jsonl")
    csv = files.folder / "pairs.csv"
    csv.write_text("file,title\n" + "".join(f"{path},a title\n" for path in paths))
    moved = shutil.copy(lines, tmp_path / "elsewhere.jsonl")
    names = {"image_column": "file", "caption_column": "title"}
    for rows in (table(lines, **names), table(str(csv), **names), table(moved, image_root=str(files.folder), **names)):
        assert [shown(rows, row) for row in range(2)] == [0, 1]
        assert rows.captions(1) == ["a title"]


def test_rows_share_a_image_by_id_or_by_path(files, table):
    paths = files.images(2)
    items = [{"image": paths[number % 2], "caption": f"caption {number}"} for number in range(4)]
    assert table(files.json(items, "by_path.json")).images() == [[0, 2], [1, 3]]
    rows = table(files.json([{**item, "image_id": f"id{number // 2}"} for number, item in enumerate(items)]))
    assert rows.images() == [[0, 1], [2, 3]]
    assert rows.image_id(0) == rows.image_id(1) != rows.image_id(2)
    rows = table(files.parquet(4, image_id=[7, 9, 7, 8]))
    assert rows.images() == [[0, 2], [1], [3]]
    assert [rows.image_id(row) for row in range(4)] == [7, 9, 7, 8]
    rows = table(files.parquet(4, "named.parquet", key=[1, 1, 2, 2]), image_id_column="key")
    assert rows.images() == [[0, 1], [2, 3]]


def test_sources_follow_one_another_and_their_ids_do_not_mix(files, table):
    parquet = files.parquet(3, image_id=[0, 1, 2])
    paths = files.images(2)
    listed = files.json([{"image": path, "caption": "listed", "image_id": number} for number, path in enumerate(paths)])
    rows = table(parquet, listed)
    assert len(rows) == 5
    assert [shown(rows, row) for row in range(5)] == [0, 1, 2, 0, 1]
    assert rows.captions(4) == ["listed"]
    assert len({rows.image_id(row) for row in range(5)}) == 5
    assert rows.name(4) == f"{listed}, row 1"


def test_globs_and_folders(files, table):
    files.parquet(2, "a.parquet")
    files.parquet(3, "b.parquet")
    assert len(table(str(files.folder / "*.parquet"))) == 5
    assert len(table(str(files.folder))) == 5


def test_image_folder_with_metadata(files, table):
    paths = files.images(3)
    files.json([{"file_name": path, "caption": f"of {path}"} for path in paths], "metadata.jsonl")
    rows = table(str(files.folder))
    assert rows.captions(2) == ["of images/2.png"]
    assert shown(rows, 2) == 2


def test_image_folder_without_captions_serves_prediction_only(files, table):
    files.images(3)
    rows = table(str(files.folder), split="predict", need_captions=False)
    assert [shown(rows, row) for row in range(3)] == [0, 1, 2]
    assert rows.captions(0) == []
    with pytest.raises(UserError, match=r"captions in one of metadata.jsonl, metadata.csv in .* got 3 images"):
        table(str(files.folder))


class Trap:
    """Ends the test if it is ever unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickled member was read",)


def test_webdataset_shards_mix_forms_and_are_never_unpickled(files, table):
    shards = [
        files.tar(
            [
                ("s/0.jpg", encoded(draw_image(0), "JPEG", quality=95)),
                ("s/0.txt", b"first"),
                ("s/0.pkl", pickle.dumps(Trap())),
                ("s/1.png", encoded(draw_image(1))),
                ("s/1.json", b'{"caption": ["second", "zweiter"], "image_id": 12, "extra": {"a": 1}}'),
                ("s/2.cls", b"3"),
                ("s/2.webp", encoded(draw_image(2), "WEBP", lossless=True)),
                ("s/2.json", b"{broken"),
            ],
            "one.tar",
        ),
        files.tar([("3.PNG", encoded(draw_image(3))), ("3.txt", "vièrte".encode())], "two.tar"),
    ]
    rows = table(str(files.folder / "*.tar"))
    assert len(rows) == 4
    assert [shown(rows, row) for row in range(4)] == [0, 1, 2, 3]
    assert [rows.captions(row) for row in range(4)] == [["first"], ["second", "zweiter"], [], ["vièrte"]]
    assert len(shards) == 2


def test_a_damaged_tar_is_named(files, table):
    path = files.tar([("0.png", encoded(draw_image(0))), ("0.txt", b"x")])
    with open(path, "r+b") as file:
        file.truncate(600)
    with pytest.raises(UserError, match=r"Expected a readable tar file, got '.*shard.tar'"):
        table(path)


def test_saved_dataset_and_its_splits(files, table):
    data = datasets.Dataset.from_parquet(files.parquet(4), cache_dir=str(files.folder / "c"))
    data.save_to_disk(files.folder / "saved")
    datasets.DatasetDict({"train": data, "dev": data.select([2])}).save_to_disk(files.folder / "split")
    assert len(table(str(files.folder / "saved"))) == 4
    rows = table(Source(str(files.folder / "split"), split="dev"))
    assert (len(rows), shown(rows, 0)) == (1, 2)
    with pytest.raises(UserError, match=r"Expected the split 'validation' in .* got train, dev"):
        table(str(files.folder / "split"), split="validation")


def test_changed_files_are_read_anew(files, table):
    paths = files.images(2)
    first = files.json([{"image": paths[0], "caption": "old"}])
    assert list(table(first).texts()) == ["old"]
    files.json([{"image": paths[0], "caption": "new"}, {"image": paths[1], "caption": "text"}])
    assert list(table(first).texts()) == ["new", "text"]


def test_missing_columns_are_named_with_those_that_exist(files, table):
    parquet = files.parquet(2, captions=["a", "b"], title=["c", "d"])
    with pytest.raises(
        UserError, match=r"the column 'titel' in .* image, caption, title: set data.caption_column to 'title'"
    ):
        table(parquet, caption_column="titel")
    with pytest.raises(UserError, match="the column 'photo'"):
        table(parquet, image_column="photo")
    with pytest.raises(UserError, match=r"set data.image_id_column"):
        table(parquet, image_id_column="number")
    listed = files.json([{"image": "a.png", "text": "b"}])
    with pytest.raises(UserError, match=r"the column 'caption' in .* image, text"):
        table(listed)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.large_string(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.string_view()),
        pa.list_(pa.string(), 2),
    ],
    ids=str,
)
def test_captions_and_labels_of_parquet_are_texts_in_every_type_that_arrow_has(files, table, kind):
    texts = ["one", "two", "three"]
    several = pa.types.is_nested(kind)
    captions = pa.array([[text, f"{text}, too"] for text in texts] if several else texts, kind)
    pq.write_table(pa.table({"image": files.images(3), "caption": captions}), files.folder / "rows.parquet")
    rows = table(str(files.folder / "rows.parquet"))
    assert rows.captions(1) == (["two", "two, too"] if several else ["two"])
    assert rows.caption_counts().tolist() == [1 + several] * 3
    if not several:
        assert table(str(files.folder / "rows.parquet"), labels=True).captions(2) == ["three"]


@pytest.mark.parametrize("kind", ["binary_view", "large_binary", "struct of views", "string_view"])
def test_images_of_parquet_are_read_in_every_type_that_arrow_has(files, table, kind):
    paths = pa.array(files.images(3))
    data = pa.array([encoded(draw_image(number)) for number in range(3)])
    columns = {
        "binary_view": data.cast(pa.binary_view()),
        "large_binary": data.cast(pa.large_binary()),
        "struct of views": pa.StructArray.from_arrays([data.cast(pa.binary_view())], ["bytes"]),
        "string_view": paths.cast(pa.string_view()),
    }
    pq.write_table(pa.table({"image": columns[kind], "caption": list("abc")}), files.folder / "rows.parquet")
    rows = table(str(files.folder / "rows.parquet"))
    assert [shown(rows, row) for row in range(3)] == [0, 1, 2]
    assert rows.image_name(1).endswith("1.png" if kind == "string_view" else "rows.parquet, row 1")


def test_columns_of_the_wrong_kind_are_named(files, table):
    parquet = files.parquet(2, number=[1, 2])
    with pytest.raises(UserError, match=r"Expected a string .* in the column 'number'"):
        table(parquet, caption_column="number")
    with pytest.raises(UserError, match=r"Expected images, .* in the column 'number'"):
        table(parquet, image_column="number")


def test_missing_files_are_named_with_a_near_one(files, table):
    files.parquet(1, "train.parquet")
    with pytest.raises(UserError, match=r"got '.*trian.parquet', which .* \(there is '.*train.parquet'\)"):
        table(str(files.folder / "trian.parquet"))
    with pytest.raises(UserError, match="Expected files that match"):
        table(str(files.folder / "*.tar"))
    (files.folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"got \['.txt'\]"):
        table(str(files.folder / "a.txt"))
    with pytest.raises(UserError, match="Expected a list of objects"):
        table(files.json({"a": 1}))
    (files.folder / "bad.json").write_text("[{")
    with pytest.raises(UserError, match="Expected valid JSON"):
        table(str(files.folder / "bad.json"))


def test_empty_and_useless_splits_are_named(files, table):
    with pytest.raises(UserError, match=r"Expected rows in the train split \('.*empty.json'\), got none"):
        table(files.json([], "empty.json")).check("train", True, False, 30)
    rows = table(files.json([{"image": f"gone/{number}.png", "caption": "x"} for number in range(3)], "gone.json"))
    with pytest.raises(UserError, match=r"got no usable row among 3 of 3 .*missing file: 3, for example .*gone/2.png"):
        rows.check("train", True, False, 30)
    rows = table(files.json([{"image": path, "caption": "?!"} for path in files.images(2)], "blank.json"))
    rows.check("train", True, False, 30)
    with pytest.raises(UserError, match="empty caption: 2"):
        rows.check("train", True, True, 30)


def test_a_row_without_an_id_is_a_image_by_itself_and_bad_where_the_user_names_the_column(files, table):
    file = files.parquet(3, image_id=[1, None, 1])
    rows = table(file)
    assert rows.images() == [[0, 2], [1]]
    assert rows.image_id(1) != 1  # its number, and the others' id
    rows = table(file, image_id_column="image_id")
    assert rows.images() == [[0, 2], [1]]
    with pytest.raises(BadSample, match="no image id"):
        rows.image_id(1)


def test_ids_as_numbers():
    assert identity_number(12, None) == identity_number("12", None) == 12
    assert identity_number("012", None) != 12
    assert identity_number("-3", None) == -3
    assert identity_number("99999999999999999999", None) < 2**63
    assert identity_number(12, 0) != identity_number(12, 1)
    assert 0 <= identity_number(2**63, None) < 2**63
    assert identity_number(2**63, None) != identity_number(2**63 + 1, None)
    assert identity_number(-(2**63), None) == -(2**63)
    for digits in ("9" * 5000, "--5", "-", "٣"):
        assert identity_number(digits, None) == text_id(digits)
    assert identity_number(10**5000, 0) != identity_number(10**5000 + 1, 0)


def test_images_stay_encoded_until_asked_for(files, table):
    buffer = io.BytesIO(b"not an image at all")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}], "caption": ["x"]}
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    path = files.folder / "bad.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    assert table(str(path)).captions(0) == ["x"]
    assert Image.MAX_IMAGE_PIXELS is not None


def test_a_table_reaches_a_spawned_worker_without_its_images(files, table):
    noise = np.random.default_rng(0).integers(0, 256, (8, 100, 100, 3), dtype=np.uint8)
    rows = [{"bytes": encoded(Image.fromarray(pixels)), "path": None} for pixels in noise]
    path = files.folder / "noise.parquet"
    datasets.Dataset.from_dict({"image": rows, "caption": [f"noise {i}" for i in range(8)]}).to_parquet(path)
    here = table(str(path))
    expected = np.asarray(here.image(5))
    sent = pickle.dumps(here)
    assert len(sent) < 30_000  # one of the images
    there = pickle.loads(sent)
    assert np.array_equal(np.asarray(there.image(5)), expected)
    assert there.captions(5) == ["noise 5"]


@pytest.mark.parametrize("name", ["pairs.csv", "PAIRS.CSV"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_as_spreadsheets_save_it(files, table, name, delimiter, encoding):
    paths = files.images(2)
    lines = [("image", "caption"), *((path, f"pièce n° {number}") for number, path in enumerate(paths))]
    path = files.folder / name
    path.write_bytes("\r\n".join(delimiter.join(line) for line in lines).encode(encoding))
    rows = table(str(path))
    assert [rows.captions(row) for row in range(2)] == [["pièce n° 0"], ["pièce n° 1"]]
    assert [shown(rows, row) for row in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pairs.csv", "image,caption\n0.png,pièce\n"),
        ("pairs.json", '[{"image": "0.png", "caption": "pièce"}]'),
        ("dataset_coco.json", '{"images": [{"filename": "0.png", "split": "train", "sentences": [{"raw": "pièce"}]}]}'),
    ],
)
def test_text_in_the_encoding_of_windows_is_named(files, table, name, text):
    (files.folder / name).write_text(text, encoding="cp1252")
    with pytest.raises(UserError, match=rf"UTF-8 in '.*{name}', got the byte 0xe8: .*iconv -f CP1252"):
        table(str(files.folder / name))


def test_a_json_line_in_another_encoding_is_one_bad_row(files):
    good, bad = ({"image": "0.png", "caption": caption} for caption in ("piece", "pièce"))
    path = files.folder / "pairs.jsonl"
    path.write_bytes(b"\n".join(json.dumps(row, ensure_ascii=False).encode("cp1252") for row in (good, bad)))
    faults = [row[FAULT] for row in read_list([str(path)], "image", "caption", None, [])]
    assert faults == [None, "text that is not UTF-8"]


def test_a_caption_with_a_comma_that_is_not_quoted_is_a_bad_row_and_not_cut(files):
    path = files.folder / "pairs.csv"
    path.write_text('image,caption\n0.png,"red, small"\n1.png,red, small\n')
    rows = list(read_list([str(path)], "image", "caption", None, []))
    assert [(row["caption"], row[FAULT]) for row in rows] == [(["red, small"], None), ([], "more values than columns")]


def test_json_with_a_byte_order_mark(files, table):
    paths = files.images(1)
    image = {"filename": paths[0], "split": "train", "sentences": [{"raw": "one"}]}
    for name, content in (("pairs.json", [{"image": paths[0], "caption": "one"}]), ("coco.json", {"images": [image]})):
        (files.folder / name).write_text(json.dumps(content), encoding="utf-8-sig")
        assert list(table(str(files.folder / name)).texts()) == ["one"]


def test_one_image_serves_prediction_only(files, table):
    path = str(files.folder / files.images(3)[1])
    rows = table(path, split="predict", need_captions=False)
    assert [shown(rows, row) for row in range(len(rows))] == [1]
    assert len(table(str(files.folder / "images" / "*.png"), split="predict", need_captions=False)) == 3
    with pytest.raises(
        UserError, match=r"Expected images with captions, got 1 image\(s\) without captions in '.*1.png'"
    ):
        table(path)
    with pytest.raises(UserError, match="Expected images with labels"):
        table(path, labels=True)


@pytest.fixture
def unreachable(monkeypatch):
    """A hub that does not answer, and how often it was asked."""
    asked = []

    def get_session():
        def head(*_, **__):
            asked.append("whether it is there")
            raise OSError("Name or service not known")

        return SimpleNamespace(head=head)

    monkeypatch.setattr("huggingface_hub.utils.get_session", get_session)
    monkeypatch.setattr("time.sleep", lambda seconds: asked.append(f"again after {seconds} s"))
    hub_is_reachable.cache_clear()
    yield asked
    hub_is_reachable.cache_clear()


def test_a_folder_with_a_typo_is_not_looked_for_on_the_hub(files, table, monkeypatch, unreachable):
    files.images(1)
    monkeypatch.chdir(files.folder.parent)
    with pytest.raises(UserError, match=r"got 'data/imagse', which does not exist.*there is 'data/images'"):
        table("data/imagse")
    assert unreachable == []


def test_a_hub_that_does_not_answer_is_asked_once(files, table, monkeypatch, unreachable):
    (files.folder / "images").mkdir()
    monkeypatch.chdir(files.folder)
    with pytest.raises(UserError, match=r"got 'user/name' \(the hub cannot be reached, and .*: correct the name\.$"):
        table("user/name")
    with pytest.raises(UserError, match=r"the hub cannot be reached.*there is 'images'"):
        table("imagse")
    with pytest.raises(UserError, match=r"of a tokenizer, got 'user/bert' \(the hub cannot be reached"):
        open_tokenizer("user/bert")
    with pytest.raises(UserError, match="the hub cannot be reached"):
        table(Source("images/name", format="hub"))
    assert unreachable == ["whether it is there"]
