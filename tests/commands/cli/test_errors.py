"""Mistakes are one sentence; defects keep their traceback."""

import builtins
import io
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from support.runs.command_line import run, tiny_config
from vlightning.commands.cli.errors import readable_errors, sentence
from vlightning.common.errors import UsageError, UserError
from vlightning.common.files import check_free


def caught(function, *args: object) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011
        function(*args)
    return info.value


class Rows(Dataset):
    """Fails in the worker, with a sentence or with a defect."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.way == "for users":
            raise UserError("The list is empty; name another.")
        if self.way == "by this package":
            check_free(Path(__file__))
        return torch.zeros(2).view(3)


def say() -> None:
    raise UserError("The width is 3,\n  not 4; set it.")


def test_an_error_for_users_is_shown_in_one_line():
    assert sentence(caught(say)) == "The width is 3, not 4; set it."


def test_an_error_that_this_package_raises_is_shown():
    assert "which exists" in sentence(caught(check_free, Path(__file__)))


def test_a_value_error_from_inside_a_library_is_a_defect():
    assert sentence(caught(torch.zeros(2).view, 3)) is None
    assert sentence(caught(int, "x")) is None


@pytest.mark.parametrize(
    ("way", "beginning"),
    [("for users", "The list is empty; name another."), ("by this package", "Expected a new name"), ("defect", None)],
)
def test_a_sentence_from_a_loader_worker_is_shown_and_a_defect_is_not(way: str, beginning: str | None):
    found = sentence(caught(list, DataLoader(Rows(way), num_workers=1)))
    assert found is None if beginning is None else found.startswith(beginning)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_says_what_differs():
    class Net(nn.Module):
        def __init__(self, width: int, extra: bool) -> None:
            super().__init__()
            self.one = nn.Linear(width, 2)
            if extra:
                self.two = nn.Linear(2, 2)

    error = caught(Net(3, True).load_state_dict, {**Net(4, False).state_dict(), "old": torch.zeros(1)})
    text = sentence(error)
    assert text is not None
    assert "Net" in text
    assert "2 weights are missing (two.weight, ...)" in text
    assert "1 weights are unexpected (old)" in text
    assert "1 differ in size (one.weight: in the checkpoint torch.Size([2, 4]), in the module torch.Size([2, 3]))" in (
        text
    )


def test_out_of_memory_says_what_to_make_smaller():
    text = sentence(caught(torch.empty, 10**15))
    assert text is not None
    assert text.startswith("Memory ran out, for 3,725,290 GiB more: lower data.batch_size")
    assert sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")) == (
        text.replace("3,725,290", "2.5")
    )


def test_the_exit_status_is_2_for_what_was_typed_and_1_for_a_run_that_stopped(capsys: pytest.CaptureFixture):
    for error, status in ((UsageError("No."), 2), (caught(say), 1)):
        with pytest.raises(SystemExit) as stopped, readable_errors():
            raise error
        assert stopped.value.code == status
    assert capsys.readouterr().err.startswith("vlightning: error: No.\nvlightning: error: ")


def test_the_environment_variable_keeps_tracebacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLIGHTNING_DEBUG", "1")
    with pytest.raises(UsageError), readable_errors():
        raise UsageError("No.")


@pytest.mark.parametrize("name", ["events.out.tfevents.*", "config.yaml", "environment.json", "hparams.yaml"])
@pytest.mark.fault("disk full at the start", "the first files are `/dev/full`", "one sentence; no run folder is left")
def test_a_disk_that_is_full_at_the_start_is_one_sentence(name, tmp_path, monkeypatch):
    plain_open = builtins.open

    def opened(file, mode="r", *args, **options):
        full = "r" not in mode and fnmatch(str(file), f"*/{name}")
        return plain_open("/dev/full" if full else file, mode, *args, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(io, "open", opened)
    ran = run("fit", "--config", tiny_config(tmp_path))
    assert ran.status == 1
    assert "([Errno 28] No space left on device): make room, or choose another folder" in ran.sentence
    assert not Path("runs").exists()


def test_an_error_in_a_class_of_the_user_is_one_sentence(tmp_path, monkeypatch):
    lines = [
        "import torch",
        "class Mine(torch.nn.Module):",
        "    def __init__(self, weights: str):",
        "        open(weights)",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    network = ("--model.teacher.network=mine.Mine", "--model.teacher.network.weights=none.pt")
    ran = run("fit", "--config=configs/cocord/quickstart.yaml", *network)
    assert ran.status == 1
    reason = "mine.Mine raised an error when it was made: [Errno 2] No such file or directory: 'none.pt'"
    assert ran.sentence == f"{reason} (--debug shows the traceback)"
