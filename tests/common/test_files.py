"""Atomic writes; files of killed processes are removed by the next save, files of running processes are kept."""

import multiprocessing
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file as save_tensors

from support.runs.command_line import convert
from support.runs.processes import by_another_process
from vlightning.callbacks import AtomicCheckpointIO, divide_checkpoint_file
from vlightning.callbacks.checkpoints.checkpoint_io import newest_whole
from vlightning.common import files
from vlightning.common.files import (
    WriteError,
    clear_leftovers,
    original_path,
    replaced_beside,
    replacing,
    swap_in,
    unfinished_beside,
)

CONTENT = {"state_dict": {"weight": torch.arange(6.0).view(3, 2)}}
FORK = multiprocessing.get_context("fork")


def save_file(folder):
    AtomicCheckpointIO().save_checkpoint(CONTENT, folder / "slow.ckpt")


def save_folder(folder):
    divide_checkpoint_file(folder / "one.ckpt", folder / "slow.ckpt", 2)


def wait_before_the_name(save, folder, reached, go_on, answer):
    """Saves, and waits before the rename."""

    def waiting(staged, target):
        reached.set()
        assert go_on.wait(60)
        swap_in(staged, target)

    files.swap_in = waiting
    try:
        save(folder)
        answer.put("saved")
    except Exception as error:
        answer.put(str(error))


@contextmanager
def a_save_in_progress(save, folder):
    """A save of another process, which is killed at the end; yields the process and a function that continues it."""
    reached, go_on, answer = FORK.Event(), FORK.Event(), FORK.Queue()
    process = FORK.Process(target=wait_before_the_name, args=(save, folder, reached, go_on, answer))
    process.start()

    def finish():
        go_on.set()
        return answer.get(timeout=60)

    try:
        assert reached.wait(60)
        yield process, finish
    finally:
        process.kill()
        process.join()


@pytest.fixture
def folder(tmp_path):
    AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "one.ckpt")
    divide_checkpoint_file(tmp_path / "one.ckpt", tmp_path / "many.ckpt", 2)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.fault(
    "another process saves into the same folder",
    "a save, and `vlightning convert` both ways, before its save has its name",
    "both are whole",
)
@pytest.mark.parametrize("save", [save_file, save_folder])
def test_a_save_in_progress_is_kept(folder, save):
    with a_save_in_progress(save, folder) as (_, finish):
        AtomicCheckpointIO().save_checkpoint(CONTENT, folder / "other.ckpt")
        convert([str(folder / "many.ckpt"), str(folder / "as file.ckpt")])
        convert([str(folder / "one.ckpt"), str(folder / "as folder.ckpt")])
        assert finish() == "saved"
    assert names(folder) == ["as file.ckpt", "as folder.ckpt", "many.ckpt", "one.ckpt", "other.ckpt", "slow.ckpt"]
    for path in folder.iterdir():
        assert torch.equal(
            AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"], torch.arange(6.0).view(3, 2)
        )


@pytest.mark.fault(
    "killed before a save has its name", "SIGKILL to another process of the machine", "the next save removes the debris"
)
@pytest.mark.parametrize("save", [save_file, save_folder])
def test_files_of_a_killed_process_are_removed_by_the_next_save(folder, save):
    with a_save_in_progress(save, folder) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and its parent has not asked for it yet
        assert len(list(folder.glob(".incomplete-*"))) == 1
        AtomicCheckpointIO().save_checkpoint(CONTENT, folder / "other.ckpt")
    assert names(folder) == ["many.ckpt", "one.ckpt", "other.ckpt"]


def test_a_reused_process_number_is_recognized_by_its_start(folder):
    staged = unfinished_beside(folder / "x.ckpt")
    staged.touch()
    earlier = staged.rename(str(staged).replace(f"-{os.getpid()}-", f"-{os.getpid()}-1"))  # started at another time
    clear_leftovers(folder)
    assert not earlier.exists()


@pytest.mark.parametrize("machine", ["another machine", None])
def test_files_of_other_machines_are_removed_after_a_day_without_change(folder, monkeypatch, machine):
    """A file without an owner in its name may belong to another machine."""
    staged, old = folder / ".incomplete-0123", folder / ".replaced-earlier.ckpt"
    if machine:
        monkeypatch.setattr(files, "_machine", lambda: "0123456789ab")
        staged, old = by_another_process(lambda: (unfinished_beside(staged), replaced_beside(folder / "earlier.ckpt")))
        monkeypatch.undo()
    staged.mkdir()
    (folder / "many.ckpt").rename(old)
    assert original_path(old) == folder / "earlier.ckpt"
    assert newest_whole(folder)[0] in (old, folder / "one.ckpt")
    clear_leftovers(folder)
    assert names(folder) == sorted([staged.name, old.name, "one.ckpt"])
    monkeypatch.setattr(files, "FOREIGN_AGE", -1.0)
    clear_leftovers(folder)
    assert names(folder) == ["earlier.ckpt", "one.ckpt"]


@pytest.mark.parametrize("writer", ["living", "dead"])
def test_an_unfinished_file_is_removed_after_its_writer_ended(tmp_path, writer):
    """A file or a folder of any age."""
    make = unfinished_beside if writer == "living" else lambda path: by_another_process(lambda: unfinished_beside(path))
    file, folder = make(tmp_path / "a"), make(tmp_path / "b")
    file.touch()
    (folder / "inside").mkdir(parents=True)
    for path in (file, folder):
        os.utime(path, (0, 0))
    with replacing(tmp_path / "c") as staged:
        staged.write_text("c")
    assert names(tmp_path) == (["c"] if writer == "dead" else sorted([file.name, folder.name, "c"]))


def test_replacing_writes_files_and_folders_or_nothing(tmp_path):
    file, folder = tmp_path / "new" / "file", tmp_path / "new" / "folder"

    def write(content):
        with replacing(file) as staged:
            staged.write_text(content)
        with replacing(folder) as staged:
            staged.mkdir()
            (staged / content).touch()

    write("one")
    write("two")
    assert (file.read_text(), names(folder)) == ("two", ["two"])
    for error in (KeyError, RuntimeError):
        with pytest.raises(error, match="stop"), replacing(file) as staged:  # noqa: PT012
            staged.write_text("three")
            raise error("stop")
    with (
        pytest.raises(
            OSError, match=r"file could not be written \(No space left\); what was there before is unchanged"
        ),
        replacing(file),
    ):
        raise OSError("No space left")
    for target in (file, folder):
        with replacing(target, keep_existing=True) as staged:
            staged.mkdir()
    assert (file.read_text(), names(folder)) == ("two", ["two"])
    assert names(tmp_path / "new") == ["file", "folder"]


@pytest.mark.parametrize("target", ["taken/new", "taken/folder/new"])
def test_a_file_where_the_folder_should_be_is_named(tmp_path, target):
    (tmp_path / "taken").write_text("content")
    with (
        pytest.raises(
            WriteError,
            match=rf"^Expected the folder {(tmp_path / target).parent}, got the file {tmp_path}/taken: move the file",
        ),
        replacing(tmp_path / target),
    ):
        pytest.fail("nothing can be written")
    assert (tmp_path / "taken").read_text() == "content"
    assert names(tmp_path) == ["taken"]


def test_concurrent_swaps_of_one_folder_keep_the_later_one(folder, monkeypatch):
    mine, others = unfinished_beside(folder / "x"), folder / "others"
    rename = os.rename
    for path in (mine, others):
        path.mkdir()
        (path / path.name).touch()

    def racing(source, target):
        if Path(source) == mine and others.exists():
            rename(others, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", racing)
    swap_in(mine, folder / "many.ckpt")
    assert names(folder / "many.ckpt") == [mine.name]
    assert names(folder) == ["many.ckpt", "one.ckpt"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_written_file_has_the_permissions_of_other_new_files(tmp_path: Path, umask: int, monkeypatch):
    monkeypatch.setattr(files, "_UMASK", umask)  # read when the module is imported
    with files.replacing(tmp_path / "folder") as staged:
        staged.mkdir()
        save_tensors({"weight": torch.zeros(1)}, staged / "weights.safetensors")
    assert (tmp_path / "folder/weights.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
