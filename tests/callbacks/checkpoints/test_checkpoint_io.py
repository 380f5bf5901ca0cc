import errno
import os
import subprocess

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from support.methods.tiny_modules import Student, loader, trainer
from vlightning.callbacks import AtomicCheckpointIO

GOOD = {"weight": torch.arange(5.0), "step": 3, "names": ["a", "b"]}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "run" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(GOOD, path)
    return path


def assert_untouched(path):
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded.pop("weight"), GOOD["weight"])
    assert loaded == {"step": 3, "names": ["a", "b"]}


def test_loaded_content_equals_saved_content(checkpoint):
    assert_untouched(checkpoint)
    AtomicCheckpointIO().save_checkpoint({"step": 4}, str(checkpoint))
    assert AtomicCheckpointIO().load_checkpoint(checkpoint) == {"step": 4}
    AtomicCheckpointIO().save_checkpoint({"step": 5}, f"file://{checkpoint}")
    assert AtomicCheckpointIO().load_checkpoint(checkpoint) == {"step": 5}


def test_the_file_has_the_permissions_of_any_new_file(checkpoint):
    plain = checkpoint.parent / "plain"
    plain.touch()
    assert checkpoint.stat().st_mode == plain.stat().st_mode


@pytest.mark.fault(
    "renaming a checkpoint fails", "os.replace raises", "one sentence; the old file unchanged, no debris"
)
def test_a_failed_rename_keeps_the_old_file_only(checkpoint, monkeypatch):
    def refuse(source, target):
        assert os.path.dirname(source) == str(checkpoint.parent)  # beside the target, hence on its file system
        assert torch.load(source, weights_only=True) == {"step": 9}  # complete before it is renamed
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"last\.ckpt could not be written .*no.*unchanged: check the free space"):
        AtomicCheckpointIO().save_checkpoint({"step": 9}, checkpoint)
    assert_untouched(checkpoint)


def test_an_unpicklable_object_keeps_the_old_file_only(checkpoint):
    with pytest.raises(Exception, match="lambda"):
        AtomicCheckpointIO().save_checkpoint({"step": lambda: 9}, checkpoint)
    assert_untouched(checkpoint)


@pytest.mark.fault(
    "interrupted while a checkpoint is flushed",
    "os.fsync raises KeyboardInterrupt",
    "the old file unchanged, no debris",
)
def test_an_interrupt_keeps_the_old_file_only(checkpoint, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": 9}, checkpoint)
    assert_untouched(checkpoint)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.fault("full disk", "a file system of 256 KiB", "one sentence; the old file unchanged, no debris")
def test_a_full_disk_keeps_the_old_file_only(small_disk):
    path = small_disk / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(GOOD, path)
    with pytest.raises(OSError, match="unchanged: check the free space"):
        AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(200_000)}, path)
    assert_untouched(path)


@pytest.mark.fault(
    "disk full in the middle of a file", "a limit on file sizes", "one sentence; the old file unchanged, no debris"
)
def test_a_disk_that_fills_up_during_the_write_keeps_the_old_file(checkpoint, monkeypatch):
    # Without a separate disk: the system's limit on the size of a file.
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="unchanged: check the free space") as raised:
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(200_000)}, checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG
    assert_untouched(checkpoint)


@pytest.mark.fault("damaged checkpoint file", "cut in half; empty; other bytes", "named as damaged in one sentence")
def test_an_unreadable_file_raises_one_sentence(checkpoint):
    whole = checkpoint.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no checkpoint at all"):
        checkpoint.write_bytes(content)
        with pytest.raises(
            RuntimeError, match=r"readable .*last\.ckpt, which is truncated or not a checkpoint"
        ) as raised:
            AtomicCheckpointIO().load_checkpoint(checkpoint)
        assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(FileNotFoundError):
        AtomicCheckpointIO().load_checkpoint(checkpoint.with_name("other.ckpt"))


class Arbitrary:
    pass


def test_more_than_plain_data_is_refused_unless_trusted(checkpoint):
    torch.save({"x": Arbitrary()}, checkpoint)
    with pytest.raises(RuntimeError, match=r"of tensors and plain data, got .* with .*Arbitrary: .*weights_only=False"):
        AtomicCheckpointIO().load_checkpoint(checkpoint)
    loaded = AtomicCheckpointIO().load_checkpoint(checkpoint, weights_only=False)
    assert isinstance(loaded["x"], Arbitrary)


class Bomb:
    """An object whose unpickling creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.fault("pickle bomb as checkpoint", "a file that runs `os.mkdir`", "refused, and it does not run")
def test_a_pickle_bomb_is_not_executed(checkpoint):
    torch.save({"x": Bomb(checkpoint.with_name("gone off"))}, checkpoint)
    with pytest.raises(RuntimeError, match="Expected a checkpoint of tensors and plain data"):
        AtomicCheckpointIO().load_checkpoint(checkpoint)
    assert not checkpoint.with_name("gone off").exists()


def test_remote_paths_and_storage_options_are_handled_by_lightning():
    AtomicCheckpointIO().save_checkpoint(GOOD, "memory://run/last.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://run/last.ckpt")["step"] == 3
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint(GOOD, "memory://run/last.ckpt", storage_options={})


def test_a_trainer_saves_and_resumes_with_it(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer(saver, enable_checkpointing=True, plugins=[AtomicCheckpointIO()]).fit(Student(), loader(3))
    assert {file.suffix for file in tmp_path.iterdir()} == {".ckpt"}
    run = trainer(plugins=[AtomicCheckpointIO()], max_epochs=2)
    run.fit(Student(), loader(3), ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 6
