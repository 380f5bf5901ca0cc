"""Pairs by URL are those of the same files on a disk, whatever the storage does, or a sentence says what failed."""

import io
import json
from pathlib import Path

import fsspec
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from support.data.images import draw_image, encoded
from support.data.storage import Flaky, s3_server, upload
from support.data.streams import global_batches, indices, outcomes, read
from support.data.web_server import web_server
from vlightning.common.errors import UserError
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.reading import remote
from vlightning.datamodules.reading.shards import Shards, find_shards

FAULTS = ("throttled", "failed", "cut")


@pytest.fixture(autouse=True)
def storage(monkeypatch):
    """An empty storage without faults, and no waiting."""
    Flaky.store.clear()
    Flaky.reads.clear()
    waits = []
    monkeypatch.setattr(Flaky, "fault", staticmethod(lambda path: None))
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    return waits


def fail_every_third(monkeypatch):
    calls = []

    def fault(path):
        calls.append(path)
        return FAULTS[len(calls) // 3 % 3] if len(calls) % 3 == 0 else None

    monkeypatch.setattr(Flaky, "fault", staticmethod(fault))
    return calls


def noise(number, side=80):
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)


def write(files, kind, count=12):
    """Write pairs in two files where the form allows it; return the pattern of the files in their folder."""
    if kind == "tar":
        for shard in (0, 1):
            members = []
            for number in range(shard * count // 2, (shard + 1) * count // 2):
                members += [(f"{number:03}.png", encoded(Image.fromarray(noise(number))))]
                members += [(f"{number:03}.txt", f"caption {number}".encode())]
                members += [(f"{number:03}.json", json.dumps({"image_id": number // 2}).encode())]
            files.tar(members, f"{shard}.tar")
        return "*.tar"
    if kind == "parquet":
        files.parquet(count // 2, "0.parquet")
        files.parquet(count // 2, "1.parquet", captions=[f"other {number}" for number in range(count // 2)])
        return "*.parquet"
    items = [{"image": path, "caption": f"caption {n}"} for n, path in enumerate(files.images(count))]
    if kind == "csv":
        (files.folder / "pairs.csv").write_text("".join(f"{i['image']},{i['caption']}\n" for i in [*HEADER, *items]))
        return "pairs.csv"
    files.json(items, f"pairs.{kind}")
    return f"pairs.{kind}"


HEADER = [{"image": "image", "caption": "caption"}]


def batches(module, source, name, tmp_path, streaming=False, **options):
    more = {"streaming": True, "samples_per_epoch": 20, "shuffle_block": 5} if streaming else {}
    options = {"max_bad_share": 0.0, "cache_dir": str(tmp_path / name), **more, **options}
    data = module(train=source, horizontal_flip=False, **options)
    data.prepare_data()
    data.setup("fit")
    return list(data.train_dataloader())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["tar", "parquet", "jsonl", "json", "csv"])
def test_batches_by_url_are_those_of_the_disk(files, module, tmp_path, monkeypatch, kind, streaming):
    pattern = write(files, kind)
    local = batches(module, str(files.folder / pattern), "local", tmp_path, streaming)
    root = upload(files.folder, "flaky://data/pairs")
    calls = fail_every_third(monkeypatch)
    found = batches(module, f"{root}/{pattern}", "remote", tmp_path, streaming)
    assert len(calls) >= 6
    assert len(found) == len(local) > 2
    for one, other in zip(local, found, strict=True):
        for name in ("image", "input_ids", "sample_index"):
            assert torch.equal(one[name], other[name]), name
        for batch in (one, other):
            assert batch["image_id"].unique().numel() <= 4
    same = [[b["image_id"][:, None] == b["image_id"][None] for b in several] for several in (local, found)]
    assert all(torch.equal(one, other) for one, other in zip(*same, strict=True))


def test_of_a_shard_only_headers_texts_and_the_images_of_the_rows_are_read(files, module, tmp_path):
    pattern = write(files, "tar")
    upload(files.folder, "flaky://data")
    data = module(train=f"flaky://data/{pattern}", cache_dir=str(tmp_path / "remote"))
    data.prepare_data()
    whole = sum(len(content.getvalue()) for content in Flaky.store.values())
    opening = sum(stop - start for _, start, stop in Flaky.reads)
    assert opening < 0.45 * whole
    data.setup("fit")
    Flaky.reads.clear()
    rows = data._opened("train")
    assert rows.captions(7) == ["caption 7"]
    assert not Flaky.reads
    assert np.array_equal(np.asarray(rows.image(7)), noise(7))
    ((path, start, stop),) = Flaky.reads
    assert (path, stop - start) == ("/data/1.tar", len(encoded(Image.fromarray(noise(7)))))
    again = module(train=f"flaky://data/{pattern}", cache_dir=str(tmp_path / "remote"))
    Flaky.reads.clear()
    again.prepare_data()
    assert not Flaky.reads  # the copy of the texts is found by the stamps of the files


def options_of(done):
    return {"done": done, "batches": 8, "batch_size": 3, "block": 5, "seed": 7, "epoch": 2}


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_stream_that_broke_off_goes_on_without_loss(files, module, tmp_path, monkeypatch, kind):
    pattern = write(files, kind)
    upload(files.folder, "flaky://data")
    options = {"streaming": True, "samples_per_epoch": 24, "cache_dir": str(tmp_path / "remote"), "read_retries": 1}

    def again():
        data = module(train=f"flaky://data/{pattern}", **options)
        data.setup("fit")
        return data._opened("train")

    rows = again()
    whole = read(rows, **options_of(0))
    seen, calls = [], []

    def fault(path):
        calls.append(path)
        return "failed" if len(calls) > limit else None

    monkeypatch.setattr(remote, "BLOCK", 2**14)
    Flaky.reads.clear()
    assert read(again(), **options_of(0)) == whole
    limit = len(Flaky.reads) - 1  # the last read is of the second of the two blocks
    monkeypatch.setattr(Flaky, "fault", staticmethod(fault))
    with pytest.raises(
        remote.RemoteError, match=r"Expected to read 'flaky://data/\d\.\w+', got an error 2 time"
    ) as error:
        seen.extend(map(indices, outcomes(again(), **options_of(0))))
    assert "\n" not in str(error.value)
    assert "data.read_retries" in str(error.value)
    assert 0 < len(seen) < len(whole)
    monkeypatch.setattr(Flaky, "fault", staticmethod(lambda path: None))
    assert seen + read(again(), **options_of(len(seen))) == whole


def test_earlier_samples_of_a_shard_are_not_read_on_resume(files, module, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK", 2**15)
    upload(files.folder, "flaky://data") if write(files, "tar", 40) else None
    data = module(train="flaky://data/1.tar", streaming=True, samples_per_epoch=20, cache_dir=str(tmp_path / "remote"))
    data.setup("fit")
    rows = data._opened("train")
    rows.count(0)

    def cost(first):
        Flaky.reads.clear()
        next(rows.rows(0, first))
        return sum(stop - start for _, start, stop in Flaky.reads)

    assert cost(15) <= cost(0) + 2**15 < len(Flaky.store["/data/1.tar"].getvalue()) / 3


def test_a_row_that_cannot_be_read_is_an_unusable_sample(files, module, tmp_path, monkeypatch):
    upload(files.folder, "flaky://data") if write(files, "jsonl") else None
    del Flaky.store["/data/images/3.png"]
    monkeypatch.setattr(Flaky, "fault", staticmethod(lambda path: "failed" if path.endswith("/5.png") else None))
    options = {"max_bad_share": 0.5, "read_retries": 2, "cache_dir": str(tmp_path / "remote"), "batch_size": 12}
    data = module(train="flaky://data/pairs.jsonl", **options)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert not {3, 5} & set(batch["sample_index"].tolist())
    assert set(data.account("train").causes) == {"missing file", "unreadable"}
    assert sum(path.endswith("/5.png") for path, *_ in Flaky.reads) % 3 == 0
    with pytest.raises(BadSample, match="unreadable"):
        data._opened("train").image(5)


def test_waits_double_and_a_missing_file_is_not_tried_again(storage, monkeypatch):
    fsspec.filesystem("flaky").pipe_file("/data/a", b"12345678")
    monkeypatch.setattr(Flaky, "fault", staticmethod(lambda path: "cut"))
    with pytest.raises(remote.RemoteError, match=r"4 time.*4 bytes instead of 8"):
        remote.read_range("flaky://data/a", 0, 8, retries=3)
    assert len(Flaky.reads) == 4
    assert all(full / 2 <= wait <= full for wait, full in zip(storage, (0.5, 1, 2), strict=True))
    storage.clear()
    with pytest.raises(FileNotFoundError, match="Expected a file at 'flaky://data/b', got none"):
        remote.read_range("flaky://data/b", 0, 8)
    assert not storage


DISGUISED = [
    "%2e%2e/secret.png",
    ".%2E/secret.png",
    "..%2fsecret.png",
    "..%2Fsecret.png",
    "%252e%252e/secret.png",
    "%25252e%25252e%25252fsecret.png",
    "..\\secret.png",
    "..%5csecret.png",
    "images/%2e%2e/%2e%2e/secret.png",
    "flaky://data/in/%2e%2e/secret.png",
    "..;/secret.png",
    "..;x=y/secret.png",
    "../secret.png?/../in/0.png",
    "../secret.png#/../in/0.png",
]


@pytest.mark.parametrize(
    "name", ["a%20b.png", "100%.png", "%2e.png", "a..b/..c.png", "a;b.png", "x/../a.png", "図.png"]
)
def test_other_names_stay_in_the_folder_of_a_list_by_url(name):
    assert remote.is_inside(f"https://host/data/{name}", "https://host/data")


def test_a_list_by_a_signed_url_names_images_beside_it(files, module, tmp_path):
    write(files, "json", 4)
    signature = "X-Amz-Credential=AKIA/20250101/us-east-1/s3/aws4_request&X-Amz-Signature=a.b/c"
    with web_server(files.folder, signed={"pairs.json": signature}) as address:
        data = module(train=f"http://{address}/pairs.json?{signature}", cache_dir=str(tmp_path / "remote"))
        data.setup("fit")
        rows = data._opened("train")
        assert [rows.image_name(row) for row in range(4)] == [f"http://{address}/images/{row}.png" for row in range(4)]
        assert rows.image(2).size == draw_image(2).size


def test_a_shard_by_a_signed_url_is_read_whole_and_streamed(files, module, tmp_path):
    write(files, "tar")
    with web_server(files.folder, signed={"0.tar": "sig=a/b.c"}) as address:
        for streaming in (False, True):
            (batch, *_) = batches(module, f"http://{address}/0.tar?sig=a/b.c", f"{streaming}", tmp_path, streaming)
            assert len(batch["image"]) == 4


def test_lists_by_url_name_no_files_elsewhere(files, module, tmp_path):
    items = [{"image": path, "caption": "text"} for path in files.images(4)]
    places = ["../secret.png", "flaky://other/secret.png", "/etc/passwd", "images/../../secret.png", *DISGUISED]
    files.json([*items, *({"image": path, "caption": "text"} for path in places)], "pairs.jsonl")
    upload(files.folder, "flaky://data/in")
    for place in ("/data/secret.png", "/other/secret.png"):
        fsspec.filesystem("flaky").pipe_file(place, encoded(draw_image(9)))
    data = module(train="flaky://data/in/pairs.jsonl", cache_dir=str(tmp_path / "remote"))
    data.setup("fit")
    rows = data._opened("train")
    causes = []
    for row in range(4, len(rows)):
        with pytest.raises(BadSample) as error:
            rows.image(row)
        causes.append(error.value.fault.cause)
    outside = "outside image_root"
    assert causes == [outside, outside, "missing file", outside, *[outside] * len(DISGUISED)]
    assert not any("secret" in path for path, *_ in Flaky.reads)


def test_reinforced_shards_by_url_are_read_by_the_index_beside_them(files, tmp_path):
    write(files, "tar")
    cache = tmp_path / "cache"
    local = Shards(find_shards([str(files.folder)]), cache)
    for file, index in zip(local.files, local.indexes, strict=True):
        kept = {"bytes": Path(file).stat().st_size, "start": index.start.tolist(), "stop": index.stop.tolist()}
        kept["keys"] = [key.decode() for key in index.keys.tolist()]
        (files.folder / file.replace(".tar", ".index.json")).write_text(json.dumps(kept))
    upload(files.folder, "flaky://data")
    found = Shards(find_shards(["flaky://data"]), tmp_path / "other")
    assert len(found) == 12
    assert not (tmp_path / "other").exists()  # no index had to be made
    Flaky.reads.clear()
    assert [found.members(sample) for sample in range(12)] == [local.members(sample) for sample in range(12)]
    assert len(Flaky.reads) == 12
    for file in files.folder.glob("*.json"):
        del Flaky.store[f"/data/{file.name}"]
    made = Shards(find_shards(["flaky://data"]), tmp_path / "other")
    assert all(np.array_equal(a.start, b.start) for a, b in zip(made.indexes, local.indexes, strict=True))


def test_what_cannot_be_read_by_url_is_one_sentence(files, module, tmp_path):
    def refused(source, **options):
        with pytest.raises(UserError) as error:
            batches(module, source, "refused", tmp_path, **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    write(files, "tar")
    upload(files.folder, "flaky://data")
    assert "Expected files at 'flaky://data/*.parquet', got none" in refused("flaky://data/*.parquet")
    assert "Expected files at 'flaky://none', got none" in refused("flaky://none")
    assert "Expected a file at 'flaky://data/9.tar', got none" in refused("flaky://data/9.tar")
    assert "Expected a package that reads nowhere://" in refused("nowhere://data/0.tar")
    assert "got hub: convert the data" in refused({"path": "flaky://data", "format": "hub"})
    fsspec.filesystem("flaky").pipe_file("/data/a.jsonl", b'{"picture": "x.png", "caption": "a"}\n')
    assert "the column 'image'" in refused("flaky://data/a.jsonl")
    with pytest.raises(UserError, match=r"data.read_retries of at least 0, got -1"):
        module(train="a.tar", read_retries=-1)


def test_ranges_are_those_of_the_content():
    content = bytes(range(256)) * 40
    fsspec.filesystem("flaky").pipe_file("/data/a", content)
    with remote.open_file("flaky://data/a", block=100) as file, io.BytesIO(content) as plain:
        for place, size in ((0, 7), (50, 300), (10_000, 500), (3, -1)):
            assert file.seek(place) == plain.seek(place)
            assert file.read(size) == plain.read(size)
        assert file.seek(-5, io.SEEK_END) == plain.seek(-5, io.SEEK_END)


@pytest.mark.slow
def test_pairs_on_a_server_of_s3_that_throttles_fails_and_cuts_off(files, module, tmp_path, monkeypatch):
    with s3_server(monkeypatch) as app:
        for kind, streaming in (("tar", False), ("tar", True), ("parquet", True), ("jsonl", False)):
            pattern = write(files, kind, 8)
            upload(files.folder, f"s3://pairs/{kind}")
            local, found = (
                batches(module, f"{root}/{pattern}", f"{kind}{root[:2]}", tmp_path, streaming)
                for root in (str(files.folder), f"s3://pairs/{kind}")
            )
            for one, other in zip(local, found, strict=True):
                assert torch.equal(one["image"], other["image"])
                assert torch.equal(one["input_ids"], other["input_ids"])
        assert min(app.faults.values()) > 1
        app.always = "throttled"
        with pytest.raises(UserError, match=r"Expected to read 's3://pairs/tar/0.tar', got an error 2 time.*throttled"):
            batches(module, "s3://pairs/tar/*.tar", "later", tmp_path, read_retries=1)


@pytest.mark.slow
def test_weighted_sources_on_a_server_of_s3_go_on_with_any_number_of_processes(files, module, tmp_path, monkeypatch):
    with s3_server(monkeypatch) as app:
        sources = []
        for kind, weight in (("tar", 2.0), ("parquet", 1.0), ("jsonl", 1.0)):
            pattern = write(files, kind, 8)
            upload(files.folder, f"s3://pairs/{kind}")
            sources.append({"path": f"s3://pairs/{kind}/{pattern}", "weight": weight})
        data = module(train=sources, streaming=True, samples_per_epoch=36, cache_dir=str(tmp_path / "remote"))
        data.setup("fit")
        rows = data._opened("train")
        options = {"batches": 3, "block": 12, "seed": 7, "epoch": 1}
        whole = global_batches(rows, 1, 12, **options)
        total = {shard: rows.count(shard) for shard in range(5)}
        assert sum(map(len, whole)) == 2 * 8 + 8 + 8 + 4 == 36  # a pass of 32 and the beginning of the next one
        assert {row >> 32 for batch in whole for row in batch} == set(total)

        @settings(max_examples=8, deadline=None)
        @given(st.integers(1, 4), st.integers(0, 3))
        def go_on(processes, done):
            assert global_batches(rows, processes, 12, done=done, **options) == whole[done:]

        go_on()
        assert min(app.faults.values()) > 1
