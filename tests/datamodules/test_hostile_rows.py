"""Rows with anything in them, in every form: the epoch ends, good rows are all there unchanged, and bad ones counted.

Examples are drawn by hypothesis, the same in every run.
"""

import csv
import io
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from support.data.images import encoded
from support.methods.reinforced import sample, write_tar
from vlightning.datamodules import ImageTextDataModule, ReinforcedImageTextDataModule

GOOD = 4
few = settings(
    max_examples=10,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # a failure is not made smaller, which takes minutes
    print_blob=False,
)

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates and NUL among them
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from(
        ["im/\0x.png", "im/\ud800.png", "a" * 5000, "../../../../etc/passwd", "/dev/zero", "pipe", ".", "", "--5"]
    ),
    st.sampled_from(["1" * 5000, 2**63, 2**64, -(2**63) - 1, 1e300, 5.0, 1.2, -0.0, 10**400]),
)
ANYTHING = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=5
)
ROW = st.one_of(
    st.fixed_dictionaries({}, optional={"image": ANYTHING, "caption": ANYTHING, "image_id": ANYTHING}),
    st.fixed_dictionaries({"image": st.just("hostile.png"), "caption": st.just("fine")}, optional={"image_id": SCALAR}),
)
# What `json.dumps` does not write: more digits than Python reads, and nesting.
RAW = st.sampled_from(
    [
        '{"image": "hostile.png", "caption": "x", "image_id": ' + "1" * 5000 + "}",
        '{"image":' + "[" * 300 + "]" * 300 + "}",
    ]
)
LINE = st.one_of(
    ROW.map(json.dumps).map(str.encode),
    RAW.map(str.encode),
    st.sampled_from(
        [b"[" * 100_000, b'{"image": "a.png", "caption', b'{"image": "\xff", "caption": "x"}', b"\0", b"\xff\xfe"]
    ),
    st.binary(min_size=1, max_size=12).map(lambda line: b"x" + line.replace(b"\n", b"")),
)


class Plain(torch.nn.Module):
    """The color of an image of one color."""

    def forward(self, image):
        return torch.from_numpy(np.array(image.resize((1, 1)))).permute(2, 0, 1).float()


def color(number):
    return (10 + number, 200 - number, 50)


def good(number):
    return {"image": f"{number}.png", "caption": f"good {number}", "image_id": f"good-{number}"}


def png(number):
    return encoded(Image.new("RGB", (4, 4), color(number)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, a pipe that nobody writes into, and a vocabulary."""
    path = tmp_path_factory.mktemp("hostile")
    for number in range(GOOD):
        (path / f"{number}.png").write_bytes(png(number))
    (path / "hostile.png").write_bytes(encoded(Image.new("RGB", (4, 4))))
    os.mkfifo(path / "pipe")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", *"0123"]))
    return path


def mixed(hostile, ours):
    """Good rows among the hostile ones."""
    rows = list(hostile)
    for number, row in enumerate(ours):
        rows.insert(number * (len(hostile) // len(ours) + 1), row)
    return rows


def check(folder, write, streaming=False):
    """Read a split: every good row is there with its image and caption; of a table, every other is there or counted.

    A stream is read by a training, since an evaluation refuses one in which an image comes up again.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        source = str(write(Path(own)))
        data = ImageTextDataModule(
            image_root=str(folder),
            train_transform=Plain(),
            eval_transform=Plain(),
            tokenizer=str(folder / "vocab.txt"),
            batch_size=1,
            eval_batch_size=5,
            num_workers=0,
            seed=0,
            max_bad_share=1.0,
            cache_dir=str(Path(own) / "cache"),
            **({"train": source, "streaming": True, "samples_per_epoch": 12 + GOOD} if streaming else {"test": source}),
        )
        data.setup("fit" if streaming else "test")
        batches = list(data.train_dataloader() if streaming else data.test_dataloader())
        images = {
            int(n): image for batch in batches for n, image in zip(batch["image_id"], batch["image"], strict=True)
        }
        owners = "image_id" if streaming else "text_image_id"
        read = {
            (data.tokenizer.decode(ids, skip_special_tokens=True), tuple(images[int(owner)].flatten().tolist()))
            for batch in batches
            for ids, owner in zip(batch["input_ids"], batch[owners], strict=True)
        }
        assert {(text, shown) for text, shown in read if text.startswith("good")} == {
            (f"good {number}", color(number)) for number in range(GOOD)
        }
        if not streaming:
            assert len(images) + data.account("test").causes.total() >= len(data._rows["test"].images())


@few
@given(st.lists(ROW.map(json.dumps) | RAW, min_size=8, max_size=12))
def test_a_json_list(folder, rows):
    def write(own):
        (own / "rows.json").write_text("[" + ",".join(mixed(rows, [json.dumps(good(n)) for n in range(GOOD)])) + "]")
        return own / "rows.json"

    check(folder, write)


@pytest.mark.parametrize("streaming", [False, True])
@few
@given(st.lists(LINE, min_size=8, max_size=12))
def test_json_lines(folder, streaming, lines):
    def write(own):
        (own / "rows.jsonl").write_bytes(
            b"\n".join(mixed(lines, [json.dumps(good(n)).encode() for n in range(GOOD)])) + b"\n"
        )
        return own / "rows.jsonl"

    check(folder, write, streaming)


@few
@given(st.lists(st.tuples(SCALAR, SCALAR | st.just("x" * 200_000), SCALAR), min_size=8, max_size=12))
def test_csv(folder, rows):
    def write(own):
        text = io.StringIO()
        table = csv.writer(text)
        table.writerow(["image", "caption", "image_id"])
        table.writerows(mixed([[row[0], row[1], f"id{number}"] for number, row in enumerate(rows)], map_good()))
        (own / "rows.csv").write_bytes(text.getvalue().encode(errors="replace"))
        return own / "rows.csv"

    check(folder, write)


def map_good():
    return [list(good(number).values()) for number in range(GOOD)]


BYTES = st.none() | st.binary(max_size=6) | TEXT.map(lambda text: text.encode(errors="surrogatepass"))
PATHS = BYTES | st.sampled_from([b"hostile.png", b"\0", b"/dev/zero", b"pipe", b"../x.png", b"\xed\xa0\x80.png"])
IDS = {
    "none": (None, None),
    "string": (pa.string(), [f"good-{number}" for number in range(GOOD)]),
    "uint64": (pa.uint64(), [2**64 - 1 - number for number in range(GOOD)]),
    "float": (pa.float64(), [1e6 + number / 4 for number in range(GOOD)]),
}
DRAWN_IDS = {
    "string": st.sampled_from(["1" * 5000, "", "5", "--5", None, "\0"]),
    "uint64": st.sampled_from([2**63, 2**63 + 1, 2**64 - 100, 0, None]),
    "float": st.sampled_from([1.2, 1.7, 5.0, float("nan"), float("inf"), None, 1e300]),
}


@pytest.mark.parametrize("streaming", [False, True])
@few
@given(st.data())
def test_parquet(folder, streaming, data):
    kind = data.draw(st.sampled_from(sorted(IDS)))
    rows = data.draw(st.lists(st.tuples(PATHS, BYTES), min_size=8, max_size=12))
    as_struct = data.draw(st.booleans())

    def write(own):
        ours = [(f"{number}.png".encode(), f"good {number}".encode()) for number in range(GOOD)]
        together = mixed(rows, ours)
        paths, captions = (pa.array(column, pa.binary()).view(pa.string()) for column in zip(*together, strict=True))
        columns = {"image": paths, "caption": captions}
        if as_struct:
            columns["image"] = pa.StructArray.from_arrays([paths], ["path"])
        if kind != "none":
            ids = data.draw(st.lists(DRAWN_IDS[kind], min_size=len(rows), max_size=len(rows)))
            columns["image_id"] = pa.array(mixed(ids, IDS[kind][1]), IDS[kind][0])
        pq.write_table(pa.table(columns), own / "rows.parquet")
        return own / "rows.parquet"

    check(folder, write, streaming)


MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "png": st.binary(max_size=8) | st.just(png(0)[:40]) | st.just(encoded(Image.new("RGB", (1, 1000)))),
        "txt": st.binary(max_size=8),
        "json": LINE | ANYTHING.map(lambda value: json.dumps({"caption": value, "image_id": value}).encode()),
    },
)


@pytest.mark.parametrize("streaming", [False, True])
@few
@given(st.lists(MEMBERS, min_size=8, max_size=12), st.binary(max_size=4).filter(lambda name: b"\0" not in name))
def test_tars(folder, streaming, samples, name):
    def write(own):
        ours = [{"png": png(number), "txt": f"good {number}".encode()} for number in range(GOOD)]
        keys = (f"{number}{os.fsdecode(name).replace('.', '').replace('/', '')}" for number in range(1000))
        return write_tar(own / "rows.tar", dict(zip(keys, mixed(samples, ours), strict=False)))

    check(folder, write, streaming)


IMAGE = st.one_of(
    ANYTHING,
    st.fixed_dictionaries(
        {"filename": TEXT | st.just("hostile.png"), "split": st.just("test"), "sentences": st.just([{"raw": "x"}])},
        optional={"filepath": ANYTHING, "imgid": ANYTHING},
    ),
    st.fixed_dictionaries({"filename": ANYTHING, "split": ANYTHING, "sentences": ANYTHING}),
)


@few
@given(st.lists(IMAGE, min_size=8, max_size=12))
def test_karpathys_form(folder, images):
    def write(own):
        ours = [
            {
                "filename": f"{number}.png",
                "split": "test",
                "imgid": 10**6 + number,
                "sentences": [{"raw": f"good {number}"}],
            }
            for number in range(GOOD)
        ]
        (own / "rows.json").write_text(json.dumps({"images": mixed(images, ours)}))
        return own / "rows.json"

    check(folder, write)


NUMBER = st.sampled_from([0, 1, 5, 2.5, -1, 99, True, None, "1", 1e30, 10**400, float("nan"), float("inf"), [0]])
AUGMENTATION = st.tuples(
    st.lists(NUMBER, min_size=4, max_size=4) | st.just([0, 0, 8, 8]),
    st.lists(st.tuples(st.integers(-1, 14) | NUMBER, NUMBER | st.floats()) | ANYTHING, max_size=2),
)
REINFORCED = st.fixed_dictionaries(
    {},
    optional={
        "jpg": st.binary(max_size=8),
        "txt": st.binary(max_size=8),
        "json": LINE
        | st.builds(lambda h, w: json.dumps({"original_height": h, "original_width": w}).encode(), NUMBER, NUMBER),
        "syn.json": LINE | ANYTHING.map(lambda value: json.dumps({"syn_text": value}).encode()),
        "paug.json": LINE
        | st.lists(AUGMENTATION, min_size=4, max_size=4).map(lambda value: json.dumps({"param_aug": value}).encode())
        | ANYTHING.map(lambda value: json.dumps({"param_aug": value}).encode()),
        "npz": st.binary(max_size=8),
    },
)


def reinforced(folder, samples):
    """The batches of an epoch, of one sample each, by sample; and the datamodule."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        shard = write_tar(Path(own) / "0.tar", {f"{number:04}": members for number, members in enumerate(samples)})
        data = ReinforcedImageTextDataModule(
            str(shard), batch_size=1, num_workers=0, image_size=8, max_bad_share=1.0, seed=1, cache_dir=own
        )
        data.setup("fit")
        return {int(batch["sample_index"]): batch for batch in data.train_dataloader()}, data.account("train")


@pytest.fixture(scope="module")
def expected(folder):
    """The batches without any hostile sample, which draw the same."""
    return reinforced(folder, [sample(number) for number in range(GOOD)])[0]


@few
@given(st.lists(REINFORCED, min_size=GOOD, max_size=GOOD))
def test_reinforced_shards(folder, expected, changes):
    ours = [sample(number) for number in range(GOOD)]
    found, account = reinforced(folder, [*ours, *(sample(9) | change for change in changes)])
    for number in range(GOOD):
        assert all(torch.equal(found[number][key], expected[number][key]) for key in expected[number])
    assert len(found) + account.causes.total() >= GOOD + len(changes)
