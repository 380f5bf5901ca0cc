"""A run of the command line that is sent a signal, under SLURM and elsewhere."""

import signal
from pathlib import Path

import pytest
import torch

from support.runs import tiny_cli
from support.runs.command_line import run, tiny_config
from support.runs.forked import run_script
from support.runs.slurm import pretend_slurm

# Two batches an epoch: after step 4 a validation begins, in which the run stops. (These data cannot go on elsewhere.)
LAST = "runs/tiny/{}/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


def fit(*words: str):
    return run("fit", "--config=tiny.yaml", "--trainer.max_epochs=3", *words)


def sender(name: str, step: int, times: int = 1) -> tuple[str, ...]:
    callback = "--trainer.callbacks"
    return (
        f"{callback}+=support.methods.tiny.Sender",
        f"{callback}.name={name}",
        f"{callback}.step={step}",
        f"{callback}.times={times}",
    )


def weights(version: str) -> dict[str, torch.Tensor]:
    return torch.load(LAST.format(version), weights_only=True)["state_dict"]


@pytest.mark.fault(
    "SIGTERM, SIGUSR1, Ctrl-C on the command line",
    "os.kill in a step",
    "checkpoint at the step's end; status 143, 138, 130; goes on exactly",
)
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_signal_ends_the_run_with_its_status_and_a_checkpoint(name: str, status: int, caplog):
    handler = signal.getsignal(signal.Signals[name])
    ran = fit(*sender(name, 3))
    assert ran.status == status
    assert torch.load(LAST.format("version_0"), weights_only=True)["global_step"] == 4
    assert f"{name}: wrote {LAST.format('version_0')} after step 4" in caplog.text
    assert "Traceback" not in ran.err
    assert signal.getsignal(signal.Signals[name]) == handler
    assert fit("--ckpt_path", LAST.format("version_0")).status == 0
    assert fit().status == 0
    for name, value in weights("version_2").items():
        assert torch.equal(weights("version_1")[name], value), name


@pytest.mark.fault("a second signal", "os.kill twice", "ends at once; the last checkpoint is whole")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_second_signal_ends_the_process_at_once(name: str):
    words = ["fit", "--config=tiny.yaml", "--trainer.max_epochs=3", *sender(name, 2, times=2)]
    ran = run_script([tiny_cli.__file__, *words])
    assert ran.returncode == -signal.Signals[name]
    assert torch.load(LAST.format("version_0"), weights_only=True)["global_step"] == 2  # of the first epoch's end


@pytest.mark.fault(
    "warning signal under SLURM", "SIGUSR1, `scontrol` recorded", "requeued; goes on in its folder, exactly"
)
def test_a_slurm_job_is_requeued_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog):
    calls = pretend_slurm(monkeypatch, tmp_path)
    ran = fit(*sender("SIGUSR1", 3))
    assert ran.status == 138
    assert calls() == ["requeue 41"]
    assert "Requeued the SLURM job 41" in caplog.text
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == ["slurm_41"]
    assert not list(Path().rglob("hpc_ckpt*"))
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    assert fit().status == 0
    pretend_slurm(monkeypatch, tmp_path, job=42)
    assert fit().status == 0
    for name, value in weights("slurm_42").items():
        assert torch.equal(weights("slurm_41")[name], value), name


def test_slurm_sends_sigterm_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path)
    assert fit(*sender("SIGTERM", 2, times=2)).status == 143
    assert torch.load(LAST.format("slurm_41"), weights_only=True)["global_step"] == 3


def test_an_arrays_task_is_requeued_by_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls = pretend_slurm(monkeypatch, tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "40")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert fit(*sender("SIGUSR1", 2)).status == 138
    assert calls() == ["requeue 40_7"]


@pytest.mark.fault("requeue fails", "`scontrol` fails or is missing", "a warning that says what to do; status 138")
def test_a_job_that_cannot_be_requeued_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path, status=1)
    with pytest.warns(match=r"The SLURM job 41 could not be requeued \(not today\)"):
        assert fit(*sender("SIGUSR1", 2)).status == 138
    (tmp_path / "bin/scontrol").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # SLURM may be installed here
    with pytest.warns(match="could not be requeued .*No such file"):
        assert fit(*sender("SIGUSR1", 2)).status == 138


def test_sigterm_and_a_callback_that_is_told_not_to_requeue_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls = pretend_slurm(monkeypatch, tmp_path)
    assert fit(*sender("SIGTERM", 2)).status == 143
    own = ("--trainer.callbacks+=StopOnSignal", "--trainer.callbacks.requeue=false")
    assert fit(*sender("SIGUSR1", 2), *own).status == 138
    assert calls() == []


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_sigterm_ends_an_evaluation_at_once(subcommand: str):
    handler = signal.getsignal(signal.SIGTERM)
    assert fit().status == 0
    sends = "--trainer.callbacks+=support.methods.tiny.EvaluationSender"
    words = (subcommand, "--config=tiny.yaml", f"--ckpt_path={LAST.format('version_0')}")
    assert run(*words, sends).status == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    assert run(*words).status == 0
    assert signal.getsignal(signal.SIGTERM) == handler
