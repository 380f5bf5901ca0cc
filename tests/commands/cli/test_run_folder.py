"""Every fresh start gets its own folder; a folder that holds a run is entered only to go on with it."""

import os
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import wandb
from jsonargparse import Namespace

from support.runs.command_line import run, tiny_config
from support.runs.slurm import pretend_slurm
from vlightning.callbacks.checkpoints.checkpoint_io import newest_whole
from vlightning.commands.cli.command_line import read_command_line
from vlightning.commands.cli.run_folder import claimed, name_run


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


def fit(*words: str):
    return run("fit", "--config=tiny.yaml", *words)


def versions(name: str = "tiny") -> list[str]:
    return sorted(path.name for path in Path("runs", name).iterdir())


def test_each_start_gets_the_next_version():
    assert fit().status == fit().status == 0
    assert versions() == ["version_0", "version_1"]


def test_a_removed_version_is_not_reused_while_a_later_one_exists():
    Path("runs/tiny/version_4").mkdir(parents=True)
    fit()
    assert versions() == ["version_4", "version_5"]


def test_a_version_that_holds_a_run_is_refused():
    assert fit("--trainer.logger.version=0").status == 0
    before = torch.load("runs/tiny/version_0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    ran = fit("--trainer.logger.version=0", "--model.learning_rate=0.5")
    assert ran.status == 2
    assert "'runs/tiny/version_0', which holds a run" in ran.sentence
    after = torch.load("runs/tiny/version_0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_of_another_run_does_not_open_the_folder():
    fit()
    fit()
    ran = fit("--trainer.logger.version=0", "--ckpt_path=runs/tiny/version_1/checkpoints/last.ckpt")
    assert "which holds a run" in ran.sentence


def test_a_resumed_run_goes_on_in_its_folder_and_keeps_the_first_config():
    fit()
    first = Path("runs/tiny/version_0/config.yaml").read_text()
    checkpoint = "runs/tiny/version_0/checkpoints/last.ckpt"
    ran = fit("--trainer.logger.version=0", f"--ckpt_path={checkpoint}", "--trainer.max_epochs=2")
    assert ran.status == 0, ran.err
    assert versions() == ["version_0"]
    assert Path("runs/tiny/version_0/config.yaml").read_text() == first
    assert "max_epochs: 2" in Path("runs/tiny/version_0/config-1.yaml").read_text()
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4


def test_a_start_that_fails_leaves_no_empty_folder():
    ran = fit("--trainer.accelerator=cuda") if not torch.cuda.is_available() else fit("--trainer.precision=16-true-x")
    assert ran.status != 0
    assert not list(Path("runs").glob("tiny/*"))


def test_a_run_is_named_after_its_config(tmp_path: Path):
    config = tiny_config(tmp_path, "configs/method/small.yaml")
    run("fit", f"--config={config}")
    assert versions("method/small") == ["version_0"]
    run("fit", f"--config={config}", "--trainer.logger.name=mine")
    assert versions("mine") == ["version_0"]


def test_without_a_logger_checkpoints_go_to_a_version_folder_too():
    fit("--trainer.logger=false")
    fit("--trainer.logger=false")
    for version in versions():
        assert Path("runs/tiny", version, "checkpoints/last.ckpt").is_file()
    assert versions() == ["version_0", "version_1"]


@pytest.mark.fault("leftover hpc_ckpt_* file", "a file in the working folder", "never loaded into another run")
def test_leftovers_of_a_requeue_in_the_working_folder_are_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    Path("hpc_ckpt_1.ckpt").write_text("of another run")
    pretend_slurm(monkeypatch, tmp_path)
    ran = run("validate", "--config=tiny.yaml")
    assert ran.status == 0, ran.err


def test_a_requeued_job_goes_on_in_its_folder_from_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path)
    assert fit().status == 0
    assert versions() == ["slurm_41"]
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    ran = fit("--trainer.max_epochs=3")
    assert ran.status == 0, ran.err
    assert versions() == ["slurm_41"]
    assert torch.load("runs/tiny/slurm_41/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6


def test_a_requeued_job_goes_on_from_a_sharded_checkpoint_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path)
    assert fit().status == 0
    last = Path("runs/tiny/slurm_41/checkpoints/last.ckpt")
    content = torch.load(last, weights_only=True) | {"files_with_pieces": 0}
    content["optimizer_states"][0]["param_groups"][0]["lr"] = 0.0  # so that it tells whether the run went on
    last.unlink()
    last.mkdir()
    torch.save(content, last / "meta.pt")
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    ran = fit("--trainer.max_epochs=3")
    assert ran.status == 0, ran.err
    after = torch.load(last, weights_only=True)
    assert after["global_step"] == 6
    assert torch.equal(after["state_dict"]["embed.weight"], content["state_dict"]["embed.weight"])


def test_a_requeued_job_takes_lightnings_checkpoint_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path)
    fit("--trainer.max_epochs=2")
    folder = Path("runs/tiny/slurm_41")
    (folder / "checkpoints/last.ckpt").rename(folder / "hpc_ckpt_1.ckpt")
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    ran = fit("--trainer.max_epochs=3")
    assert ran.status == 0, ran.err
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 6


def test_a_second_run_of_the_same_job_gets_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path)
    fit()
    fit()
    run("validate", "--config=tiny.yaml")
    assert versions() == ["slurm_41", "slurm_41_0", "slurm_41_validate_0"]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


CHECKPOINTS = Path("runs/tiny/slurm_41/checkpoints")


@pytest.mark.fault("last.ckpt damaged", "cut in half", "the newest whole one instead, and a line that says so")
def test_a_damaged_last_checkpoint_is_passed_over_with_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_slurm(monkeypatch, tmp_path)
    assert fit("--trainer.max_epochs=2").status == 0
    (best,) = CHECKPOINTS.glob("best*.ckpt")
    os.utime(best, (1, 1))  # older
    damage(CHECKPOINTS / "last.ckpt")
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    ran = fit("--trainer.max_epochs=3")
    assert ran.status == 0, ran.err
    assert f"The checkpoint '{CHECKPOINTS / 'last.ckpt'}' is damaged" in ran.err
    assert f"Going on from '{best}'" in ran.err
    assert torch.load(CHECKPOINTS / "last.ckpt", weights_only=True)["global_step"] == 6

    damage(CHECKPOINTS / "last.ckpt")
    ran = fit("--trainer.max_epochs=4", "--ckpt_path=last", "--trainer.logger.version=slurm_41")
    assert ran.status == 0, ran.err
    assert "Going on from" in ran.err

    for path in CHECKPOINTS.glob("*.ckpt"):
        damage(path)
    pretend_slurm(monkeypatch, tmp_path, restarts=2)
    ran = fit("--trainer.max_epochs=5")
    assert ran.status == 2
    assert f"Expected a whole checkpoint in '{CHECKPOINTS}'" in ran.err


def test_a_sharded_checkpoint_is_whole_with_all_its_files(tmp_path: Path):
    """Also one under the name that a killed process left it with."""
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    torch.save({"files_with_pieces": 2, "state_dict": {}}, folder / "meta.pt")
    torch.save({}, folder / "shard-00000.pt")
    assert newest_whole(tmp_path)[1][folder].startswith("1 of 2 files with pieces are missing")
    torch.save({"weight": torch.ones(100)}, folder / "shard-00001.pt")
    assert newest_whole(tmp_path) == (folder, {})
    left = folder.rename(tmp_path / ".replaced-last.ckpt")
    assert newest_whole(tmp_path) == (left, {})
    damage(left / "shard-00001.pt")
    newest, found = newest_whole(tmp_path)
    assert newest is None
    assert found[left].startswith("shard-00001.pt: ")


def slurm_job(monkeypatch: pytest.MonkeyPatch, folder: Path, restarts: int, *seeds: int) -> list[str]:
    """Two commands of one job, as its script gives them; where each wrote."""
    pretend_slurm(monkeypatch, folder, restarts=restarts)
    said = []
    for seed in seeds:
        ran = fit(f"--seed_everything={seed}", "--trainer.max_epochs=2")
        assert ran.status == 0, ran.err
        said += [line.removeprefix("Run folder: ") for line in ran.out.splitlines() if line.startswith("Run folder: ")]
    return said


def test_each_command_of_a_requeued_job_goes_on_in_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = slurm_job(monkeypatch, tmp_path, 0, 1, 2)
    assert before == ["runs/tiny/slurm_41", "runs/tiny/slurm_41_0"]
    assert slurm_job(monkeypatch, tmp_path, 1, 2, 1) == before[::-1]
    for seed, folder in enumerate(before, 1):
        assert torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)["TinyData"] == {"seed": seed}
    assert slurm_job(monkeypatch, tmp_path, 1, 3) == ["runs/tiny/slurm_41_1"]  # one that had not begun before


def test_two_commands_of_a_job_that_start_together_do_not_share_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The second one looks while the first has claimed its folder and written nothing."""
    pretend_slurm(monkeypatch, tmp_path)
    typed = read_command_line(["fit", "--config=tiny.yaml"])
    folders = []
    with ExitStack() as both:
        for _ in range(2):
            arguments = Namespace(save_dir="runs", name="a")
            trainer = Namespace(logger=Namespace(class_path="CSVLogger", init_args=arguments))
            both.enter_context(claimed(Namespace(trainer=trainer), "a", typed, None))
            folders.append(trainer.default_root_dir)
        assert folders == ["runs/a/slurm_41", "runs/a/slurm_41_0"]
    assert not Path("runs").exists()


def test_a_requeued_job_goes_on_from_its_own_checkpoint_not_from_where_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert fit().status == 0
    words = ("--ckpt_path=runs/tiny/version_0/checkpoints/last.ckpt", "--trainer.max_epochs=3")
    pretend_slurm(monkeypatch, tmp_path)
    assert fit(*words).status == 0
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    ran = fit(*words)
    assert ran.status == 0, ran.err
    restored = [line for line in caplog.messages if line.startswith("Restored all states")]
    assert restored[-1].endswith("runs/tiny/slurm_41/checkpoints/last.ckpt")


def test_a_start_that_fails_before_the_first_batch_leaves_no_folder():
    ran = fit("--model=FailingModel", "--trainer.num_sanity_val_steps=1")
    assert ran.status == 1
    assert "cannot be trained" in ran.sentence
    assert not Path("runs").exists()
    assert fit().status == 0
    assert fit("--model=FailingModel", "--trainer.logger.name=b").status == 1
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"]


ROOT = ("--trainer.logger=false", "--trainer.default_root_dir=shared")


def step(folder: str) -> int:
    return torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)["global_step"]


def test_runs_without_a_logger_in_one_root_folder_do_not_overwrite_each_other():
    assert fit(*ROOT, "--trainer.max_epochs=2").status == 0
    assert fit(*ROOT).status == 0
    assert (step("shared/tiny/version_0"), step("shared/tiny/version_1")) == (4, 2)
    assert not Path("runs").exists()
    ran = fit(*ROOT, "--ckpt_path=last", "--trainer.max_epochs=3")
    assert ran.status == 0, ran.err
    assert step("shared/tiny/version_2") == 6
    folder = "shared/tiny/version_0"  # to go on in the same folder
    words = (f"--trainer.default_root_dir={folder}", f"--ckpt_path={folder}", "--trainer.max_epochs=3")
    ran = fit("--trainer.logger=false", *words)
    assert ran.status == 0, ran.err
    assert f"Run folder: {folder}\n" in ran.out
    assert step(folder) == 6
    assert sorted(path.name for path in Path("shared/tiny").iterdir()) == ["version_0", "version_1", "version_2"]


def test_a_requeued_job_without_a_logger_goes_on_in_its_root_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for restarts, epochs in ((0, 1), (1, 3)):
        pretend_slurm(monkeypatch, tmp_path, restarts=restarts)
        ran = fit(*ROOT, f"--trainer.max_epochs={epochs}")
        assert ran.status == 0, ran.err
    restored = [line for line in caplog.messages if line.startswith("Restored all states")]
    assert restored[-1].endswith("shared/tiny/slurm_41/checkpoints/last.ckpt")
    assert [path.name for path in Path("shared/tiny").iterdir()] == ["slurm_41"]
    assert step("shared/tiny/slurm_41") == 6


def test_a_requeued_job_with_only_links_to_older_checkpoints_goes_on_from_the_one_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert fit("--checkpoint.mode=min", "--trainer.max_epochs=2").status == 0
    pretend_slurm(monkeypatch, tmp_path)
    given = "--ckpt_path=runs/tiny/version_0/checkpoints/last.ckpt"
    assert fit("--checkpoint.mode=min", given, "--trainer.max_epochs=3").status == 0
    Path("runs/tiny/slurm_41/checkpoints/last.ckpt").unlink()  # as if it was killed while it wrote its first one
    pretend_slurm(monkeypatch, tmp_path, restarts=1)
    ran = fit("--checkpoint.mode=min", given, "--trainer.max_epochs=3")
    assert ran.status == 0, ran.err
    restored = [line for line in caplog.messages if line.startswith("Restored all states")]
    assert restored[-1].endswith("runs/tiny/version_0/checkpoints/last.ckpt")


WANDB = "{class_path: WandbLogger, init_args: {offline: true, name: mine, save_dir: logs}}"
CSV = "{class_path: CSVLogger, init_args: {save_dir: logs, name: mine}}"
BOARD = "{class_path: TensorBoardLogger, init_args: {save_dir: logs, name: mine}}"


@pytest.mark.parametrize(
    ("logger", "files"),
    [
        (WANDB, ["wandb"]),
        (CSV, ["metrics.csv"]),
        (f"[{BOARD}, {CSV}]", ["events*", "metrics.csv"]),
        (f"[{WANDB}, {CSV}]", ["wandb", "metrics.csv"]),
    ],
)
def test_a_run_has_one_folder_with_any_logger(logger: str, files: list[str]):
    words = [f"--trainer.logger={logger}", "--trainer.log_every_n_steps=1"]
    ran = fit(*words)
    assert ran.status == 0, ran.err
    (folder,) = Path("logs/mine").iterdir()
    assert folder.name == "version_0"
    for name in ("config.yaml", "environment.json", "checkpoints/last.ckpt", "checkpoints/best-step2.ckpt", *files):
        assert list(folder.glob(name)), name
    assert sorted(path.name for path in Path("logs").iterdir()) == ["mine"]
    assert not Path("runs").exists()
    ran = run("test", "--config=tiny.yaml", "--ckpt_path=last", *words)
    assert ran.status == 0, ran.err
    assert f"Checkpoint: {folder}/checkpoints/" in ran.out
    ran = fit(*words, "--ckpt_path=last", "--trainer.max_epochs=2")
    assert ran.status == 0, ran.err
    (resumed,) = [line.removeprefix("Run folder: ") for line in ran.out.splitlines() if line.startswith("Run folder")]
    assert Path(resumed).parent == Path("logs/mine")
    assert step(resumed) == 4
    wandb.finish()


def test_the_name_of_a_wandb_run_is_that_of_its_folder():
    ran = fit("--trainer.logger=WandbLogger", "--trainer.logger.offline=true", "--trainer.logger.name=mine")
    assert ran.status == 0, ran.err
    wandb.finish()
    assert run("validate", "--config=tiny.yaml", "--ckpt_path=runs/mine/version_0").status == 0
    assert fit("--trainer.logger.name=mine", "--ckpt_path=last", "--trainer.max_epochs=2").status == 0
    assert step("runs/mine/version_1") == 4


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["albef/quickstart.yaml"], "albef_quickstart"),
        (["albef/quickstart.yaml", "strategy/ddp.yaml"], "albef_quickstart"),
        (["albef/quickstart.yaml", "mine.yaml"], "albef_quickstart_mine"),
        (["albef/quickstart.yaml", "my_data.yaml"], "albef_quickstart"),
        (["albef/quickstart.yaml", "my_data.yaml", "mine.yaml"], "albef_quickstart_mine"),
        (["albef/quickstart.yaml", "mine.yaml", "faster.yaml"], "albef_quickstart_mine"),
        (["albef/quickstart.yaml", "mine.yaml", "strategy/ddp.yaml"], "albef_quickstart_mine"),
        (["albef/quickstart.yaml", "mine.yaml", "--trainer.logger.name=typed"], "typed"),
        (["albef/quickstart.yaml", "named.yaml"], "named_inside"),
        (["mine.yaml", "faster.yaml"], "mine"),
        (["mine.yaml", "derived.yaml"], "derived"),
        (["mobileclip/base.yaml", "mobileclip/paper.yaml"], "mobileclip/paper"),
        (["mmlg/quickstart.yaml", "mmlg/quickstart_descendant.yaml"], "mmlg_quickstart_descendant"),
    ],
)
def test_a_derived_run_has_a_name_of_its_own(words: list[str], name: str):
    Path("mine.yaml").write_text("trainer: {max_epochs: 4}")
    Path("my_data.yaml").write_text("data: {init_args: {train: pairs.json}}")
    Path("faster.yaml").write_text("data: {init_args: {num_workers: 4}}")
    Path("derived.yaml").write_text("{needs: mine.yaml, data: {init_args: {batch_size: 8}}}")
    Path("named.yaml").write_text("trainer: {logger: {init_args: {name: named_inside}}}")
    typed = read_command_line(["fit", *(word if word.startswith("--") else f"--config={word}" for word in words)])
    logger = Namespace(class_path="TensorBoardLogger", init_args=Namespace(save_dir="runs", name="vlightning"))
    config = Namespace(trainer=Namespace(logger=logger))
    assert name_run(config, typed, None) == logger.init_args.name == name


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_an_evaluation_does_not_ask_for_the_callbacks_of_the_training(subcommand: str):
    assert fit("--last_checkpoint.every_n_train_steps=1").status == 0
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        ran = run(subcommand, "--config=tiny.yaml", "--ckpt_path=last")
    assert ran.status == 0, ran.err
    assert not [each for each in raised if "callbacks" in str(each.message)]


def test_a_job_of_another_engine_goes_on_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("VLIGHTNING_JOB", "albef-4m.1")
    assert fit().status == 0
    assert fit("--trainer.max_epochs=3").status == 0  # another command of the job
    assert versions() == ["albef-4m.1", "albef-4m.1_0"]
    assert fit("--trainer.max_epochs=3").status == 0
    restored = [line for line in caplog.messages if line.startswith("Restored all states")]
    assert [line.rpartition("runs/")[2] for line in restored] == ["tiny/albef-4m.1_0/checkpoints/last.ckpt"]
    assert step("runs/tiny/albef-4m.1_0") == 6
    for name in ("../elsewhere", "version_3", "a b"):
        monkeypatch.setenv("VLIGHTNING_JOB", name)
        assert f"got {name!r}" in fit().sentence
    assert versions() == ["albef-4m.1", "albef-4m.1_0"]
