"""Checkpoints that are written while the training goes on."""

import errno
import os
import signal
import threading

import pytest
import torch
from lightning import Callback

from support.methods.tiny_modules import Student, loader, trainer
from vlightning.callbacks import AtomicCheckpointIO, ShardedStrategy
from vlightning.callbacks.checkpoints import checkpoint_io as code
from vlightning.callbacks.checkpoints.checkpoint_io import newest_whole
from vlightning.callbacks.stopping import save_resumable
from vlightning.commands.cli.checkpoints import BestCheckpoint, LastCheckpoint
from vlightning.common.errors import UserError
from vlightning.common.files import WriteError


def step_of(path):
    return torch.load(path, weights_only=True)["step"]


@pytest.fixture
def gate(monkeypatch):
    """No file gets its name before the gate opens."""
    opened, write = threading.Event(), code.write_file

    def held(content, path):
        write(content, path)
        assert opened.wait(60)

    monkeypatch.setattr(code, "write_file", held)
    yield opened
    opened.set()


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    return path


@pytest.fixture
def writer():
    return AtomicCheckpointIO(asynchronous=True)


def test_a_save_returns_before_the_file_exists_and_holds_the_values_of_its_time(tmp_path, writer, gate, started):
    path, weight = tmp_path / "last.ckpt", torch.arange(4.0)
    checkpoint = {"state": {"a": weight, "tied": weight.detach()}, "sizes": [1, {"k": 2}]}
    writer.save_checkpoint(checkpoint, path)
    weight.zero_()
    checkpoint["sizes"][1]["k"] = 3
    assert not path.exists()
    gate.set()
    loaded = writer.load_checkpoint(path)  # waits
    assert torch.equal(loaded["state"]["a"], torch.arange(4.0))
    assert loaded["state"]["a"].data_ptr() == loaded["state"]["tied"].data_ptr()
    assert loaded["sizes"] == [1, {"k": 2}]
    assert not started.threads("checkpoints")


def test_a_replaced_checkpoint_is_removed_when_the_new_one_is_complete(tmp_path, old, writer, gate):
    new = tmp_path / "new.ckpt"
    writer.save_checkpoint({"step": 2}, new)
    writer.remove_checkpoint(old)
    assert (old.exists(), new.exists()) == (True, False)
    gate.set()
    writer.wait()
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.fault(
    "renaming a checkpoint fails that is written in the background",
    "os.replace raises",
    "one sentence at the next save or at the end; the old file unchanged and not removed, no debris",
)
@pytest.mark.parametrize("end", ["save", "teardown"])
def test_an_error_of_the_writing_is_raised_at_the_next_save_or_the_end(end, tmp_path, old, writer, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        writer.save_checkpoint({"step": 2}, old)
        writer.remove_checkpoint(old)
        writer._background._jobs[-1].result()
    with pytest.raises(WriteError, match=r"old\.ckpt could not be written .*no.*unchanged: check the free space"):
        writer.save_checkpoint({"step": 3}, old) if end == "save" else writer.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    assert step_of(old) == 1
    writer.save_checkpoint({"step": 4}, old)  # the error is raised once
    writer.teardown()
    assert step_of(old) == 4


@pytest.mark.fault(
    "killed while a checkpoint is written in the background",
    "SIGKILL before it gets its name",
    "the old one is found; the next save removes the debris",
)
def test_a_kill_during_the_writing_leaves_the_old_checkpoint(tmp_path, old, gate):
    reading, written = os.pipe()
    child = os.fork()
    if child == 0:
        writer = AtomicCheckpointIO(asynchronous=True)
        (tmp_path / "link.ckpt").symlink_to("new.ckpt")
        writer.save_checkpoint({"step": 2}, tmp_path / "new.ckpt")
        writer.remove_checkpoint(old)
        while not list(tmp_path.glob(".incomplete-*")):
            pass
        os.write(written, b"1")
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(reading, 1)
    os.waitpid(child, 0)
    assert newest_whole(tmp_path) == (old, {})
    gate.set()
    AtomicCheckpointIO().save_checkpoint({"step": 3}, tmp_path / "new.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"old.ckpt", "link.ckpt", "new.ckpt"}
    assert newest_whole(tmp_path)[0].resolve() == tmp_path / "new.ckpt"


def test_few_copies_wait_at_a_time(tmp_path, writer, gate, monkeypatch):
    for number in range(2):
        writer.save_checkpoint({"step": number}, tmp_path / f"{number}.ckpt")
    third = threading.Thread(target=writer.save_checkpoint, args=({"step": 2}, tmp_path / "2.ckpt"))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.set()
    third.join()
    writer.wait()
    assert [step_of(tmp_path / f"{number}.ckpt") for number in range(3)] == [0, 1, 2]


class Metric(Callback):
    """Logs a metric that improves, and writes a checkpoint as a signal does."""

    def __init__(self):
        self.found = None

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/recall_mean", float(trainer.global_step))

    def on_train_end(self, trainer, pl_module):
        path = save_resumable(trainer, filename="stopped")
        self.found = torch.load(path, weights_only=True)["global_step"]


def test_a_run_keeps_the_best_and_the_last_checkpoint_and_goes_on_from_them(tmp_path):
    files = {}
    for asynchronous in (False, True):
        folder, metric = tmp_path / str(asynchronous), Metric()
        checkpoints = [BestCheckpoint(dirpath=str(folder)), LastCheckpoint(dirpath=str(folder))]
        run = trainer(
            metric, *checkpoints, plugins=[AtomicCheckpointIO(asynchronous)], max_epochs=3, enable_checkpointing=True
        )
        torch.manual_seed(0)
        run.fit(Student(), loader(2), loader(1))
        assert metric.found == 6
        assert checkpoints[0].best_model_path == str(folder / "best-step6.ckpt")
        files[asynchronous] = {path.name: torch.load(path, weights_only=True) for path in folder.iterdir()}
    assert files[False].keys() == files[True].keys() == {"best-step6.ckpt", "last.ckpt", "stopped.ckpt"}
    for name, content in files[False].items():
        for key, weight in content["state_dict"].items():
            assert torch.equal(weight, files[True][name]["state_dict"][key])
    resumed = trainer(plugins=[AtomicCheckpointIO(True)], max_epochs=4)
    resumed.fit(Student(), loader(2), ckpt_path=tmp_path / "True" / "last.ckpt")
    assert resumed.global_step == 8


def test_folders_are_not_written_in_the_background(writer):
    strategy = ShardedStrategy()
    strategy.checkpoint_io = writer
    with pytest.raises(UserError, match=r"without asynchronous for checkpoints that are folders.* one file"):
        strategy.setup_environment()
