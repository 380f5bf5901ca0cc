"""Random access to tar files: places, a cache, and damage that is found."""

import io
import os
import signal
import tarfile
import tempfile
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.methods.reinforced import write_tar
from vlightning.common.errors import UserError
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.reading import tar as tar_file
from vlightning.datamodules.reading.shards import Shards, find_shards
from vlightning.datamodules.reading.tar import sample_spans, tar_index, tar_indexes
from vlightning.datamodules.reading.tar_scan import scan_plain


def content(number):
    return {"jpg": bytes([number]) * (700 + number), "txt": f"text {number}".encode(), "syn.json": b"{}"}


def two_files(folder):
    samples = {f"{'deep/' * 30}sample{number:04d}": content(number) for number in range(7)}  # names of over 100 letters
    write_tar(folder / "1.tar", dict(list(samples.items())[:4]))
    write_tar(folder / "2.tar", dict(list(samples.items())[4:]))
    return list(samples)


def test_samples_are_read_in_any_order(tmp_path):
    keys = two_files(tmp_path / "data")
    opened = Shards(find_shards([str(tmp_path / "data")]), tmp_path / "cache")
    assert len(opened) == 7
    for number in np.random.default_rng(0).permutation(7).tolist():
        assert opened.members(number) == content(number)
        assert opened.key(number) == keys[number]
    assert [opened.locate(number)[0] for number in range(7)] == [0, 0, 0, 0, 1, 1, 1]


def test_the_headers_are_read_once_and_again_when_the_file_has_changed(tmp_path, monkeypatch):
    two_files(tmp_path / "data")
    file = str(tmp_path / "data" / "1.tar")
    reads = []
    read_index = tar_file._read_index
    monkeypatch.setattr(tar_file, "_read_index", lambda path: reads.append(path) or read_index(path))
    first, second = (tar_index(file, tmp_path / "cache") for _ in range(2))
    assert len(reads) == 1
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    write_tar(tmp_path / "data" / "1.tar", {"a": content(1), "b": content(2), "c": content(3)})
    assert len(tar_index(file, tmp_path / "cache").keys) == 3
    assert len(reads) == 2


def test_a_damaged_cache_is_made_anew(tmp_path):
    two_files(tmp_path / "data")
    file = str(tmp_path / "data" / "1.tar")
    expected = tar_index(file, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    for content in (b"", b"no archive", kept.read_bytes()[:200]):
        kept.write_bytes(content)
        assert np.array_equal(tar_index(file, tmp_path / "cache").start, expected.start)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, caplog):
    two_files(tmp_path / "data")
    (tmp_path / "file").write_text("")
    index = tar_index(str(tmp_path / "data" / "1.tar"), tmp_path / "file" / "cache")
    assert len(index.keys) == 4
    assert "could not be cached" in caplog.text


def damaged(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:2500], "unexpected end of data|it is truncated"),
        (lambda data: data[:2560] + b"\xff" * 512 + data[3072:], "a damaged header at byte"),
        (lambda data: b"no tar file" * 100, "Expected a readable tar file"),
        (lambda data: b"", "Expected a readable tar file"),
    ],
    ids=["cut", "damaged in the middle", "no tar", "empty"],
)
def test_a_damaged_file_is_one_sentence(tmp_path, change, message):
    path = write_tar(tmp_path / "1.tar", {f"{number}": {"txt": b"x" * 10, "cls": b"1" * 600} for number in range(4)})
    damaged(path, change)
    with pytest.raises(UserError, match=message) as error:
        tar_index(str(path), tmp_path / "cache")
    assert str(path) in str(error.value)
    assert str(error.value).endswith("copy the file again.")


def test_a_file_that_changes_under_the_index_is_a_bad_sample(tmp_path):
    path = write_tar(tmp_path / "1.tar", {f"{number}": content(number) for number in range(3)})
    opened = Shards([str(path)], tmp_path / "cache")
    damaged(path, lambda data: b"\xff" * len(data))
    with pytest.raises(BadSample, match="unreadable shard"):
        opened.members(1)


def test_archives_of_all_kinds_of_headers(tmp_path):
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{kind}.tar"
        with tarfile.open(path, "w", format=kind) as tar:
            for number in range(3):
                for name, data in content(number).items():
                    info = tarfile.TarInfo(f"folder/{'long' * 20}/{number}.{name}")
                    info.size = len(data)
                    info.mtime = 1.5 if kind == tarfile.PAX_FORMAT else 1
                    tar.addfile(info, io.BytesIO(data))
        opened = Shards([str(path)], tmp_path / "cache")
        assert [opened.members(number) for number in range(3)] == [content(number) for number in range(3)]


def test_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode("Stra\xdfe".encode("latin-1"))
    opened = Shards([str(write_tar(tmp_path / "1.tar", {name: content(1), "b": content(2)}))], tmp_path / "cache")
    assert [opened.members(number) for number in range(2)] == [content(1), content(2)]
    assert opened.key(0) == name


def test_missing_shards_are_one_sentence(tmp_path):
    for source in (str(tmp_path), str(tmp_path / "*.tar"), str(tmp_path / "none.tar")):
        with pytest.raises(UserError, match=r"Expected tar files in .*, got none"):
            find_shards([source])


TYPES = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "s": tarfile.SYMTYPE, "l": tarfile.LNKTYPE}
NAMES = st.text(st.sampled_from("ab./-_é"), min_size=1, max_size=12)
MEMBERS = st.lists(st.tuples(NAMES, st.integers(0, 1500), st.sampled_from("ffffffffdsl")), max_size=12)


@settings(max_examples=150, deadline=None)
@given(MEMBERS, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.booleans())
def test_the_scan_of_headers_finds_what_the_reader_of_the_library_finds(members, kind, long):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        with tarfile.open(path, "w", format=kind) as tar:
            for name, size, what in members:
                header = tarfile.TarInfo(("long/" * 24 if long and what == "f" else "") + name)
                header.type = TYPES[what]
                header.size, header.linkname = (size, "") if what == "f" else (0, "a")
                tar.addfile(header, io.BytesIO(b"x" * size))
        spans = list(sample_spans(str(path)))
        scanned = scan_plain(str(path))
        if scanned is not None:
            assert list(zip(scanned.keys.tolist(), scanned.start.tolist(), scanned.stop.tolist(), strict=True)) == spans
        names = list(map(itemgetter(0), members))
        if members and not long and all(what == "f" for *_, what in members) and all(map(str.isascii, names)):
            assert scanned is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:700],
        lambda content: b"!" + content[1:],
        lambda content: content[:124] + b"-0000000001" + content[135:],
        lambda content: content[:1536] + b"!" + content[1537:],
    ],
)
def test_the_scan_leaves_damaged_files_to_the_reader_of_the_library(tmp_path, change):
    file = tmp_path / "a.tar"
    write_tar(file, {"a": content(1), "b": content(2)})
    assert scan_plain(str(file)) is not None
    file.write_bytes(change(file.read_bytes()))
    assert scan_plain(str(file)) is None


def test_several_processes_make_the_indexes_of_one(tmp_path, monkeypatch):
    files = [str(tmp_path / f"{number}.tar") for number in range(9)]
    for number, file in enumerate(files):
        write_tar(Path(file), {f"{number}_{sample}": content(sample) for sample in range(number)})
    expected = [tar_index(file, tmp_path / "one") for file in files]
    monkeypatch.setattr(tar_file, "available_cores", lambda: 3)
    found = tar_indexes(files, tmp_path / "several")
    assert [len(index.keys) for index in found] == list(range(9))
    for one, other in zip(expected, found, strict=True):
        assert all(np.array_equal(*arrays) for arrays in zip(one, other, strict=True))
    assert len(list((tmp_path / "several").iterdir())) == len(files)
    Path(files[5]).write_bytes(b"no tar" * 200)
    with pytest.raises(UserError, match="Expected a readable tar file"):
        tar_indexes(files, tmp_path / "again")


def killed_reader(file, cache):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_ends_the_indexing(tmp_path, monkeypatch):
    files = [str(tmp_path / f"{number}.tar") for number in range(9)]
    monkeypatch.setattr(tar_file, "available_cores", lambda: 3)
    monkeypatch.setattr(tar_file, "tar_index", killed_reader)
    with pytest.raises(UserError, match="killed, probably because the memory was used up"):
        tar_indexes(files, tmp_path)
