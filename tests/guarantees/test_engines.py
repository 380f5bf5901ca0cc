"""The engines of docs/engines.md: a process dies and the job goes on; parts of shards give the bytes of one process."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.data.colors import write_colors
from support.methods.reinforcement import write_pairs
from support.runs import tiny_cli
from support.runs.command_line import run
from support.runs.forked import run_ranks
from support.runs.slurm import pretend_slurm

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "configs/engines"
SEARCHED = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
TRAINING = (
    "--model=support.methods.tiny.TinyModel",
    "--data=support.methods.tiny.TinyData",
    "--trainer.logger.name=tiny",
    "--trainer.max_epochs=4",  # of two steps
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
)
DDP = ("--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.use_distributed_sampler=false")


def dies(folder: Path) -> tuple[str, ...]:
    """Rank 1 is killed in the third epoch."""
    callback = "--trainer.callbacks"
    return (
        f"{callback}+=support.methods.tiny.DiesOnce",
        f"{callback}.left={folder / 'died'}",
        f"{callback}.step=5",
    )


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after a training of two processes, none of which dies."""
    folder = tmp_path_factory.mktemp("whole")
    for done in run_ranks([tiny_cli.__file__, "fit", *TRAINING, *DDP], cwd=folder):
        assert done.returncode == 0, done.stderr
    return weights(folder / "runs/tiny/version_0/checkpoints/last.ckpt")


def assert_went_on(folder: Path, said: str, whole: dict[str, torch.Tensor]) -> None:
    assert (folder / "died").exists()
    assert [path.name for path in (folder / "runs/tiny").iterdir()] == ["job"]
    assert "Restored all states from the checkpoint at runs/tiny/job/checkpoints/last.ckpt" in said
    found = weights(folder / "runs/tiny/job/checkpoints/last.ckpt")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.fault(
    "torchrun: a process dies", "SIGKILL of rank 1 in a step", "started again: the same end, bit for bit"
)
def test_torchrun_starts_the_processes_again_and_the_job_goes_on(tmp_path: Path, whole: dict[str, torch.Tensor]):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*torchrun, tiny_cli.__file__, "fit", *TRAINING, *DDP, *dies(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"VLIGHTNING_JOB": "job", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert_went_on(tmp_path, said, whole)
    assert set(re.findall("Process group at the end: .*", said)) == {"Process group at the end: False"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Ray on this machine, with two cores."""
    ray = pytest.importorskip("ray")  # the extra `ray`, which `test` contains
    folder = tmp_path_factory.mktemp("ray")
    variables = {"PYTHONPATH": SEARCHED, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=True)
    yield folder
    ray.shutdown()


def run_engine(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    """Run a script as the page shows it."""
    monkeypatch.setattr(sys, "argv", [str(ENGINES / name), *words])
    runpy.run_path(str(ENGINES / name), run_name="__main__")


@pytest.mark.slow
@pytest.mark.fault(
    "Ray Train: a worker dies", "SIGKILL of rank 1 in a step", "started again: the same end, bit for bit"
)
def test_ray_train_starts_its_workers_again_and_the_job_goes_on(
    cluster: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, torch.Tensor],
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    options = ("--name=job", "--workers=2", f"--storage={cluster / 'train'}", "--max_failures=1")
    with pytest.raises(SystemExit) as stop:
        run_engine(monkeypatch, "ray_train.py", *options, *TRAINING, *dies(tmp_path))
    said = "".join(capfd.readouterr())
    assert stop.value.code == 0, said
    assert_went_on(tmp_path, said, whole)


@pytest.mark.slow
def test_ray_prepares_a_trainer_of_the_package_lightning(cluster: Path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train() -> list[object]:
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy
        from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

        from support.methods.tiny import TinyData, TinyModel

        trainer = Trainer(
            accelerator="cpu",
            devices="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        prepare_trainer(trainer).fit(TinyModel(), TinyData())
        return [trainer.world_size, trainer.global_step, isinstance(trainer.strategy, DDPStrategy)]

    result = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="own", storage_path=str(cluster / "own")),
    ).fit()
    assert result.return_value == [2, 1, True]


@pytest.mark.parametrize("name", ["RayFSDPStrategy", "FSDPStrategy"])
def test_fsdp1_is_refused_also_that_of_ray(name: str):
    ran = run("fit", *TRAINING, f"--trainer.strategy=ray.train.lightning.{name}")
    assert f"got FSDP1 ({name})" in ran.sentence


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_colors(tmp_path_factory.mktemp("parts"))
    write_pairs(folder / "pairs.parquet")
    return folder


def embedding(files: Path, store: Path) -> list[str]:
    options = ("--shard_size=6", "--batch_size=4", "--num_workers=0", "--accelerator=cpu")
    return ["embed", f"local-dir:{files}/model", f"--data.train={files}/pairs.csv", f"--output={store}", *options]


def reinforcement(files: Path, folder: Path) -> list[str]:
    data = {"pairs": files / "pairs.parquet", "folder": folder, "synthetic_column": "made", "augmentations": 2}
    data |= {"shard_size": 4, "batch_size": 3, "image_size": 16, "num_workers": 0, "cache_dir": files / "cache"}
    return [
        "predict",
        "--model=support.methods.reinforcement.Embeds",
        "--data=ReinforcementDataModule",
        *(f"--data.{name}={value}" for name, value in data.items()),
        "--trainer.callbacks+=ReinforcementWriter",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.enable_progress_bar=false",
    ]


COMMANDS = {"embed": (embedding, "32 rows in 6 shards"), "predict": (reinforcement, "10 samples in 3 shards")}


@pytest.fixture(scope="module", params=COMMANDS)
def command(request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory):
    """The words for a folder, and the files of one process."""
    words, _ = COMMANDS[request.param]
    folder = tmp_path_factory.mktemp("one") / "made"
    os.chdir(folder.parent)
    ran = run(*words(files, folder))
    assert ran.status == 0, ran.err
    made = content(folder)
    assert json.loads(made["manifest.json"])["complete"] is True
    return lambda other: words(files, other), made


def array_task(monkeypatch: pytest.MonkeyPatch, folder: Path, task: int, count: int, words: list[str]) -> list[str]:
    """The words that configs/slurm/array.sh gives to `vlightning` in a task."""
    pretend_slurm(monkeypatch, folder, job=50 + task)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", str(count - 1))
    (folder / "bin/srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "bin/srun").chmod(0o755)
    script = ["bash", str(ROOT / "configs/slurm/array.sh"), *words]
    program, *given = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert program == "vlightning"
    return given


def test_the_tasks_of_a_slurm_array_make_the_files_of_one_process(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, whole = command
    made = tmp_path / "made"
    for task in (2, 0, 1):
        ran = run(*array_task(monkeypatch, tmp_path, task, 3, words(made)))
        assert ran.status == 0, ran.err
        assert json.loads((made / "manifest.json").read_text())["complete"] is (task == 1)
        shards = {name for name in content(made) if name.endswith((".arrow", ".tar"))}
        assert shards == {
            name for name in whole if name.endswith((".arrow", ".tar")) and int(name[:8]) % 3 in {2, 0, task}
        } - ({"00000000.tar", "00000000.arrow", "00000003.arrow"} if task == 2 else set())
    assert content(made) == whole


@pytest.mark.slow
def test_the_actors_of_a_ray_data_job_make_the_files_of_one_process(command, cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, whole = command
    run_engine(monkeypatch, "ray_parts.py", "--parts=3", "--actors=2", *words(tmp_path / "made"))
    assert content(tmp_path / "made") == whole


@pytest.mark.parametrize("part", ["3/3", "1", "-1/2", "0/0", "a/b"])
def test_a_part_that_does_not_exist_is_refused(part: str, files: Path, tmp_path: Path):
    assert f"got '{part}'" in run(*embedding(files, tmp_path / "store"), f"--part={part}").sentence
    words = reinforcement(files, tmp_path / "made")
    assert f"got '{part}'" in run(*words, f"--data.part={part}").sentence
    assert not list(tmp_path.iterdir())
