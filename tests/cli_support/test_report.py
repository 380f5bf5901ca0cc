"""Mistakes are one sentence; defects keep their traceback."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vlightning.cli_support.command_line import UsageError
from vlightning.cli_support.report import readable_errors, spoken


def caught(function, *args: object) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011
        function(*args)
    return info.value


class Rows(Dataset):
    """Fails in the worker, with a sentence or with a defect."""

    def __init__(self, sentence: bool) -> None:
        self.sentence = sentence

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sentence:
            raise ValueError("The list is empty; name another.")
        return torch.zeros(2).view(3)


def say() -> None:
    raise ValueError("The width is 3,\n  not 4; set it.")


def test_a_sentence_raised_by_this_package_is_shown_in_one_line():
    assert spoken(caught(say)) == "The width is 3, not 4; set it."


def test_a_value_error_from_inside_a_library_is_a_defect():
    assert spoken(caught(torch.zeros(2).view, 3)) is None
    assert spoken(caught(int, "x")) is None


@pytest.mark.parametrize("sentence", [True, False])
def test_a_sentence_from_a_loader_worker_is_shown_and_a_defect_is_not(sentence: bool):
    error = caught(list, DataLoader(Rows(sentence), num_workers=1))
    assert spoken(error) == ("The list is empty; name another." if sentence else None)


def test_a_checkpoint_that_does_not_fit_says_what_differs():
    class Net(nn.Module):
        def __init__(self, width: int, extra: bool) -> None:
            super().__init__()
            self.one = nn.Linear(width, 2)
            if extra:
                self.two = nn.Linear(2, 2)

    error = caught(Net(3, True).load_state_dict, {**Net(4, False).state_dict(), "old": torch.zeros(1)})
    sentence = spoken(error)
    assert sentence is not None
    assert "Net" in sentence
    assert "2 weights are missing (two.weight, ...)" in sentence
    assert "1 weights are unexpected (old)" in sentence
    assert "1 differ in size (one.weight: in the checkpoint torch.Size([2, 4]), in the module torch.Size([2, 3]))" in (
        sentence
    )


def test_out_of_memory_says_what_to_make_smaller():
    sentence = spoken(caught(torch.empty, 10**15))
    assert sentence is not None
    assert sentence.startswith("Memory ran out, for 3,725,290 GiB more: lower data.batch_size")
    assert spoken(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")) == (
        sentence.replace("3,725,290", "2.5")
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
