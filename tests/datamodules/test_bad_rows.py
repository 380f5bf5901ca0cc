"""What one bad row does in each reader: it is counted by its cause, and the others are as they were."""

import gzip
import io
import json
import os
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.data.images import draw_image, encoded
from support.methods.captioning import write_embeddings
from support.methods.reinforced import augmentations, pth_gz, sample, write_tar
from support.runs.command_line import run
from support.runs.processes import by_another_process
from vlightning.common.errors import UserError
from vlightning.common.files import unfinished_beside
from vlightning.datamodules import ImageClassificationDataModule, ReinforcedImageTextDataModule
from vlightning.datamodules.base.decode import decode_image, read_regular
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.pairs.embedded_rows import (
    CaptionReader,
    EmbeddedEvaluationSet,
    EmbeddedImages,
    ImageEmbeddings,
)
from vlightning.datamodules.pairs.rows import CaptionRows
from vlightning.datamodules.reading.open import Opening
from vlightning.datamodules.reading.shards import SeparateImages, Shards
from vlightning.datamodules.reinforced.rows import SampleEmbeddings
from vlightning.datamodules.reinforced.writer import ShardFile
from vlightning.datamodules.stores.store import FeatureStore

COUNT = 8
CLIP = {"tokenizer": "clip", "vocab_size": 50_000}  # needs no training captions


def causes(data, split="train"):
    """What was counted in one epoch, and the rows that were in it."""
    data.prepare_data()
    data.setup("fit")
    rows = {number for batch in data.train_dataloader() for number in batch["sample_index"].tolist()}
    return dict(data.account(split).causes), rows


WRONG = {
    "NUL in the path": ({"image": "images/\0.png"}, "invalid path"),
    "surrogate in the path": ({"image": "images/\ud800.png"}, "lone surrogate in the path"),
    "surrogate in the caption": ({"caption": "hello \ud800"}, "lone surrogate in the caption"),
    "surrogate in the id": ({"image_id": "\ud800"}, "lone surrogate in the image id"),
    "id that is NaN": ({"image_id": float("nan")}, "image id not finite"),
    "no image": ({"image": None}, "no image"),
    "a pipe": ({"image": "pipe"}, "no regular file"),
    "a device": ({"image": "/dev/zero"}, "no regular file"),
    "a folder": ({"image": "images"}, "unreadable"),
}


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_json_lines(files, module, streaming):
    paths = files.images(COUNT + len(WRONG) + 2)
    os.mkfifo(files.folder / "pipe")
    items = [{"image": path, "caption": f"caption {number}", "image_id": "7"} for number, path in enumerate(paths)]
    for item, (change, _) in zip(items[COUNT:], WRONG.values(), strict=False):
        item |= change
    lines = [json.dumps(item).encode() for item in items]
    lines[-2:] = [b"[" * 100_000, b'{"image": "\xff']
    (files.folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    options = {"streaming": True, "samples_per_epoch": len(lines)} if streaming else {}
    found, rows = causes(module(train=str(files.folder / "rows.jsonl"), batch_size=1, max_bad_share=1.0, **options))
    assert set(found) == {cause for _, cause in WRONG.values()} | {"invalid JSON", "text that is not UTF-8"}
    assert rows == set(range(COUNT))


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unclosed_quotation_mark_in_a_csv_file_is_one_bad_row(files, module, streaming):
    lines = [f"{path},caption {number}" for number, path in enumerate(files.images(12))]
    lines[5] = 'images/5.png,"5 inch screen'
    (files.folder / "rows.csv").write_text("\n".join(["image,caption", *lines]))
    options = {"streaming": True, "samples_per_epoch": 12} if streaming else {}
    found, rows = causes(module(train=str(files.folder / "rows.csv"), batch_size=1, max_bad_share=1.0, **options))
    assert found == {"unclosed quotation mark": 1}
    assert rows == set(range(12)) - {5}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_named_twice_is_refused_in_parquet(files, module, streaming):
    text = pa.array(files.images(4))
    pq.write_table(pa.Table.from_arrays([text] * 3, ["image", "caption", "caption"]), files.folder / "rows.parquet")
    data = module(train=str(files.folder / "rows.parquet"), streaming=streaming, samples_per_epoch=4)
    with pytest.raises(UserError, match=r"Expected different names of columns in .*rows.parquet', got 'caption' 2"):
        data.setup("fit")


def test_ids_of_thousands_of_digits_leave_a_list_readable_and_ids_apart(files, module):
    paths = files.images(4)
    ids = ["1" * 5000, "1" * 4999 + "2", "1.2", "1.7"]
    items = ",".join(f'{{"image": "{p}", "caption": "x", "image_id": {n}}}' for p, n in zip(paths, ids, strict=True))
    (files.folder / "rows.json").write_text(f"[{items}]")
    data = module(test=str(files.folder / "rows.json"), **CLIP)
    data.setup("test")
    (batch,) = data.test_dataloader()
    assert len(set(batch["image_id"].tolist())) == 4
    (files.folder / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"valid JSON in '.*deep.json', got another content \(maximum recursion depth"):
        module(test=str(files.folder / "deep.json")).setup("test")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("ids", "kind", "bad"),
    [
        ([1.2, 1.7, 5.0, float("nan")], pa.float64(), {"image id not finite": 1}),
        ([2**63, 2**64 - 1, 2**63 + 1, 5], pa.uint64(), {}),
        ([1, 2, None, 5], pa.int64(), {"no image id": 1}),
    ],
    ids=["float", "uint64", "null"],
)
def test_ids_of_parquet(files, module, streaming, ids, kind, bad):
    names = pa.StructArray.from_arrays([pa.array(files.images(4))], ["path"])
    pq.write_table(
        pa.table({"image": names, "caption": list("abcd"), "key": pa.array(ids, kind)}), files.folder / "rows.parquet"
    )
    options = {"max_bad_share": 1.0, "streaming": streaming, "image_id_column": "key", **CLIP}
    data = module(test=str(files.folder / "rows.parquet"), image_root=str(files.folder), **options)
    data.setup("test")
    found = [number for batch in data.test_dataloader() for number in batch["image_id"].tolist()]
    assert len(set(found)) == 4 - sum(bad.values())
    assert 5 in found
    assert dict(data.account("test").causes) == bad


@pytest.mark.parametrize("streaming", [False, True])
def test_text_that_is_not_utf_8_in_parquet(files, module, streaming):
    captions = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"image": pa.array(files.images(3)), "caption": captions}), files.folder / "rows.parquet")
    data = module(
        train=str(files.folder / "rows.parquet"),
        test=str(files.folder / "rows.parquet"),
        max_bad_share=1.0,
        streaming=streaming,
        samples_per_epoch=3,
    )
    data.setup(None)
    assert sum(len(batch["image"]) for batch in data.test_dataloader()) == 2
    assert dict(data.account("test").causes) == {"unreadable (UnicodeDecodeError)": 1}


def test_paths_leave_the_root_only_where_nobody_named_one(files, module):
    inside, outside = files.images(2)
    (files.folder / "lists").mkdir()
    items = [
        {"image": f"../{inside}", "caption": "by dots"},
        {"image": str(files.folder / outside), "caption": "absolute"},
    ]
    source = files.json(items, "lists/rows.json")
    data = module(test=source, **CLIP)
    data.setup("test")
    assert sum(len(batch["image"]) for batch in data.test_dataloader()) == 2
    (files.folder / "lists" / "0.png").write_bytes(encoded(draw_image(0)))
    items.append({"image": str(files.folder / "lists" / ".." / "lists" / "0.png"), "caption": "absolute, but inside"})
    confined = {"image_root": str(files.folder / "lists"), "max_bad_share": 1.0}
    data = module(test=files.json(items, "lists/rows.json"), **confined, **CLIP)
    data.setup("test")
    assert [batch["sample_index"].tolist() for batch in data.test_dataloader()] == [[2]]
    assert dict(data.account("test").causes) == {"outside image_root": 2}


def test_images_that_would_fill_the_memory_are_refused(tmp_path):
    with pytest.raises(BadSample, match="too elongated"):
        decode_image(encoded(draw_image(0, (1, 2000))), None, "image")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(BadSample, match="too large"):
        read_regular(tmp_path / "sparse", "image")


def test_rows_without_a_label_are_counted(tmp_path):
    rows = {"image": [{"bytes": encoded(draw_image(number)), "path": None} for number in range(5)]}
    labels = pa.array([b"cat", None, b"\xff", b"dog", b"cat"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({**rows, "label": labels}), tmp_path / "rows.parquet")
    source, cache = str(tmp_path / "rows.parquet"), str(tmp_path / "cache")
    data = ImageClassificationDataModule(source, batch_size=1, num_workers=0, max_bad_share=1.0, cache_dir=cache)
    found, seen = causes(data)
    assert set(found) == {"no label", "unreadable (UnicodeDecodeError)"}
    assert seen == {0, 3, 4}
    assert data.class_names == ("cat", "dog")
    assert data.training_labels() == [0, -1, -1, 1, 0]


def test_embedded_captions(files, tmp_path):
    captions = pa.array([b"one", b"\xff", b"three", b"four"], pa.binary()).view(pa.string())
    names = [f"/{number}.png" for number in range(4)]
    pq.write_table(pa.table({"image": names, "caption": captions}), tmp_path / "rows.parquet")
    values = torch.ones(4, 3)
    values[2] = torch.nan
    store = FeatureStore(write_embeddings(tmp_path / "embeddings", names, values=values))
    opened = Opening(None, "image", "caption", None, str(tmp_path / "cache")).open(str(tmp_path / "rows.parquet"), "x")
    images = EmbeddedImages([opened], ImageEmbeddings(store, "image"))
    outcomes = [EmbeddedEvaluationSet(images, images.images(), True)[number] for number in range(4)]
    bad = {1: "unreadable (UnicodeDecodeError)", 2: "non-finite embedding"}
    assert {n: outcome.faults[0].cause for n, outcome in enumerate(outcomes) if outcome.sample is None} == bad
    read = CaptionReader(CaptionRows(images))
    for number in range(4):
        if number in bad:
            with pytest.raises(BadSample, match=bad[number].partition(" (")[0]):
                read(number, (0, 0))
        else:
            assert read(number, (0, 0)).sample_index == number


def with_operation(operation):
    return {"paug.json": {"param_aug": [[box, [operation, None]] for box, _ in augmentations(5)]}}


def with_box(box):
    return {"paug.json": {"param_aug": [[box, rest] for _, rest in augmentations(5)]}}


INFINITE = float("inf")
UNREADABLE = "unreadable paug.json"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (with_operation([10, 99]), UNREADABLE),
        (with_operation([10, 0]), UNREADABLE),
        (with_operation([3, float("nan")]), UNREADABLE),
        (with_operation([5, INFINITE]), UNREADABLE),
        (with_operation([2.5, 1]), UNREADABLE),
        (with_box([0, 0, INFINITE, 4]), UNREADABLE),
        (with_box([0, 0, float("nan"), 4]), UNREADABLE),
        (with_box([True, False, 5, 5]), UNREADABLE),
        ({"paug.json": b'{"a":' * 100_000}, UNREADABLE),
        ({"paug.json": {"param_aug": "[" * 100_000}}, UNREADABLE),
        ({"syn.json": b"[" * 100_000}, "no synthetic caption"),
        ({"syn.json": {"syn_text": ["\ud800 a"] * 3}}, "lone surrogate in the caption"),
        ({"json": {"original_height": 0, "original_width": 0}}, "original size not positive"),
        ({"json": {"original_height": -5, "original_width": 3}}, "original size not positive"),
        ({"json": b"[" * 100_000}, None),
        ({"json": {"original_height": True, "original_width": True}}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_reinforced_rows(tmp_path, changes, cause):
    samples = {f"{number}": sample(number) for number in range(4)}
    for kind, value in changes.items():
        samples["1"][kind] = value if isinstance(value, bytes) else json.dumps(value).encode()
    shard = write_tar(tmp_path / "a.tar", samples)
    options = {"image_size": 16, "max_bad_share": 1.0, "cache_dir": str(tmp_path / "cache")}
    data = ReinforcedImageTextDataModule(str(shard), batch_size=1, num_workers=0, **options)
    found, rows = causes(data)
    assert set(found) == ({cause} if cause else set())
    assert rows == ({0, 2, 3} if cause else {0, 1, 2, 3})


def test_embeddings_do_not_unpack_to_more_than_they_may(monkeypatch):
    monkeypatch.setattr("vlightning.datamodules.reinforced.rows.MAX_EMBEDDING_BYTES", 100_000)
    arrays = {"image_emb": torch.zeros(4, 12), "text_emb": torch.zeros(4, 12)}
    SampleEmbeddings({"pth.gz": pth_gz(arrays)}, "good")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image_emb.npy", bytes(10**6))
    assert len(bomb.getvalue()) < 100_000
    unpacked = []
    monkeypatch.setattr(torch, "load", lambda *args, **options: unpacked.append(args))
    for members in (
        {"pth.gz": gzip.compress(bytes(10**7))},
        {"pth.gz": gzip.compress(bomb.getvalue())},
        {"npz": bomb.getvalue()},
    ):
        with pytest.raises(BadSample, match="unreadable"):
            SampleEmbeddings(members, "bomb")
    assert not unpacked


def test_an_index_beside_a_shard_that_was_replaced_by_one_of_equal_size_is_not_trusted(tmp_path):
    def content(number):
        return {"jpg": bytes([number]) * 700, "txt": f"text {number}".encode()}

    with ShardFile(tmp_path / "0.tar") as shard:
        for number in range(5):
            shard.add(f"{number}", content(number))
        shard.finish()
    size = (tmp_path / "0.tar").stat().st_size
    cache = tmp_path / "cache"
    assert [Shards([str(tmp_path / "0.tar")], cache).members(n) for n in range(5)] == [content(n) for n in range(5)]
    assert not cache.exists()  # the index beside it was used

    write_tar(tmp_path / "0.tar", {f"{number}": content(number) for number in range(4, -1, -1)})
    assert (tmp_path / "0.tar").stat().st_size == size
    again = Shards([str(tmp_path / "0.tar")], cache)
    assert [(again.key(n), again.members(n)) for n in range(5)] == [(str(4 - n), content(4 - n)) for n in range(5)]

    # What a look at some places does not show is found when the sample is read.
    write_tar(tmp_path / "0.tar", {key: content(int(key)) for key in "03214"})
    kept = Shards([str(tmp_path / "0.tar")], tmp_path / "other")
    assert kept.members(0) == content(0)
    with pytest.raises(BadSample, match="another sample than in the index"):
        kept.members(1)


@pytest.mark.parametrize("uid", ["../secret", "{root}/secret", "a/../../secret", "\0"])
def test_a_uid_does_not_lead_out_of_the_folder_of_images(tmp_path, uid):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "b.jpg").write_bytes(b"open")
    samples = {"0": {"json": b"{}"}}
    shards = Shards([str(write_tar(tmp_path / "0.tar", samples))], tmp_path / "cache")
    beside = SeparateImages(str(tmp_path / "images"), shards, tmp_path / "cache", [".jpg"])
    assert beside.members(0, "0", uid.format(root=tmp_path)) == {}
    assert beside.members(0, "0", "a/b") == {"jpg": b"open"}


def test_an_index_clears_what_killed_writers_left(tmp_path):
    left, living = by_another_process(lambda: unfinished_beside(tmp_path / "x")), unfinished_beside(tmp_path / "x")
    for path in (left, living):
        path.write_bytes(b"x")
    Shards([str(write_tar(tmp_path / "data" / "0.tar", {"0": {"txt": b"x"}}))], tmp_path)  # makes an index there
    assert (left.exists(), living.exists()) == (False, True)


HOSTILE = "x\x1b]0;title\x07\x1b[2J\nvlightning: error: the disk is on fire\u202e.png"


@pytest.mark.parametrize("streaming", [False, True])
def test_the_name_of_a_bad_row_is_one_line_of_the_log_without_escape_codes(files, module, caplog, streaming):
    items = [{"image": path, "caption": "text"} for path in files.images(30)]
    items[3]["image"] = HOSTILE
    more = {"streaming": True, "samples_per_epoch": 30} if streaming else {}
    data = module(train=files.json(items, "pairs.jsonl"), **more)
    data.setup("fit")
    list(data.train_dataloader())
    name = r"x\x1b]0;title\x07\x1b[2J\nvlightning: error: the disk is on fire\u202e.png"
    assert any(name in text for text in caplog.messages)
    assert all(text.isprintable() for text in caplog.messages)


def test_the_name_of_a_bad_row_in_an_error_and_in_a_report_is_one_line(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = [{"image": path, "caption": "text"} for path in files.images(2)]
    source = files.json([*items, {"image": HOSTILE, "caption": "text"}])
    words = ("--config=configs/albef/tiny.yaml", "--data=ImageTextDataModule", f"--data.train={source}")
    ran = run("data", *words, "--data.num_workers=0", "--data.image_size=32")
    assert ran.status == 0, ran.err
    assert "on fire" in ran.out
    assert all(line.isprintable() for line in (ran.out + ran.err).split("\n"))
    assert not any(line.startswith("vlightning: error") for line in (ran.out + ran.err).split("\n"))
    ran = run("fit", *words, "--data.num_workers=0", "--data.image_size=32", f"--data.validation={HOSTILE}")
    assert ran.status == 1
    assert ran.sentence.isprintable()
