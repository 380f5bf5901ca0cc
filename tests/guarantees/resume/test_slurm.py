"""The shipped templates on a real SLURM of two nodes: an interrupted job ends with identical weights."""

import re
from pathlib import Path

import pytest

from support.runs.forked import VLIGHTNING, run_ranks
from support.runs.resume import assert_same_checkpoints
from support.runs.slurm_cluster import missing, slurm_cluster

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "configs/slurm"
EPOCH, STEPS = 12, 15
HELD_AT = 7  # after the first checkpoint
# Options of sbatch: the templates are for nodes of eight GPUs.
SMALL_NODES = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--time=15")
MODEL = {
    "vision.width": 32,
    "vision.depth": 1,
    "vision.heads": 2,
    "text.width": 32,
    "text.heads": 2,
    "text.ffn_width": 64,
    "contrast.embed_dim": 16,
    "contrast.queue_size": 64,
    "optim.warmup_steps": 5,
}


@pytest.fixture(scope="module")
def running_cluster():
    reason = missing()
    if reason:
        pytest.skip(f"no SLURM: {reason}")
    with slurm_cluster() as running:
        yield running


@pytest.fixture
def cluster(running_cluster):
    """The cluster with an empty queue: the jobs of a test that fails must not hold the nodes of the next."""
    yield running_cluster
    running_cluster.cancel_all()


def training(processes):
    data = {"image_size": 16, "batch_size": 4, "length": EPOCH * 4 * processes, "eval_length": 8, "num_workers": 2}
    return (
        f"--config={ROOT / 'configs/albef/quickstart.yaml'}",
        *(f"--model.{name}={value}" for name, value in MODEL.items()),
        *(f"--data.{name}={value}" for name, value in data.items()),
        f"--trainer.max_steps={STEPS}",
        "--last_checkpoint.every_n_train_steps=5",
        "--trainer.callbacks+=support.methods.tiny.WaitForSlurm",
        f"--trainer.callbacks.step={HELD_AT}",
    )


def last_checkpoint(folder, job):
    return folder / f"runs/albef_quickstart/slurm_{job}/checkpoints/last.ckpt"


def uninterrupted(folder, processes):
    """Train without SLURM, and return the last checkpoint."""
    folder.mkdir()
    for done in run_ranks(
        [VLIGHTNING, "fit", *training(processes), f"--trainer.devices={processes}"], processes, cwd=folder
    ):
        assert done.returncode == 0, done.stderr
    return folder / "runs/albef_quickstart/version_0/checkpoints/last.ckpt"


def assert_goes_on(cluster, folder, job, whole, signal):
    """Check that a job that gets the signal in its first epoch ends like the uninterrupted one; return its log."""
    assert cluster.wait(job, "COMPLETED")["Restarts"] == "1"
    path = last_checkpoint(folder, job)
    leaves = assert_same_checkpoints(whole, path)
    assert leaves["/global_step"] == STEPS
    log = (folder / f"slurm-{job}.out").read_text()
    name = path.relative_to(folder)
    stopped = re.search(f"{signal}: wrote {name} after step ([0-9]+); the training resumes from there", log)
    assert stopped, log
    assert 0 < int(stopped[1]) < EPOCH
    assert f"Restored all states from the checkpoint at {name}" in log
    assert "Traceback" not in log
    assert "vlightning: error" not in log
    return log


@pytest.mark.slow
@pytest.mark.fault(
    "SLURM: the time is nearly up, 2 nodes",
    "SIGUSR1 to the job's steps in mid-epoch",
    "requeued: the same end, bit for bit",
)
def test_a_job_on_two_nodes_is_requeued_by_the_signal_and_resumes(cluster, tmp_path):
    words = ("--nodes=2", *SMALL_NODES, SLURM / "many_nodes.sh", *training(processes=2))
    job = cluster.submit(words, tmp_path)
    cluster.wait_for_file(last_checkpoint(tmp_path, job), job)
    cluster.run("scancel", "--signal=USR1", job)
    log = assert_goes_on(cluster, tmp_path, job, uninterrupted(tmp_path / "whole", 2), "SIGUSR1")
    assert f"Requeued the SLURM job {job}." in log


@pytest.mark.slow
@pytest.mark.fault(
    "SLURM: pre-empted, with and without a grace time",
    "a job of higher priority takes the node in mid-epoch",
    "requeued: the same end, bit for bit",
)
def test_preempted_jobs_are_requeued_and_resume(cluster, tmp_path):
    words = (*SMALL_NODES, SLURM / "preemptible.sh", *training(processes=1))
    graceful, at_once = jobs = [
        cluster.submit((f"--partition={partition}", f"--nodelist={node}", *words), tmp_path)
        for partition, node in (("graceful", "n1"), ("at_once", "n2"))
    ]
    for job in jobs:
        cluster.wait_for_file(last_checkpoint(tmp_path, job), job)
    for node in ("n1", "n2"):
        cluster.submit(("--partition=urgent", f"--nodelist={node}", "--wrap=true"), tmp_path)
    whole = uninterrupted(tmp_path / "whole", 1)
    for job in (at_once, graceful):
        assert_goes_on(cluster, tmp_path, job, whole, "SIGTERM")
