"""A method of a package outside this repository gets every command, and no file here knows it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.data.images import draw_image
from support.runs.forked import run_ranks, run_script

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests/support/methods"
TRAINER = "trainer: {accelerator: cpu, enable_progress_bar: false, enable_model_summary: false, max_epochs: 1}\n"
CONFIGS = {
    "toy.yaml": "model: {class_path: ToyMethod, init_args: {vision: {width: 7}}}\n"
    "data: {class_path: other_package.ToyData}\n" + TRAINER,
    "pairs.yaml": "model: {class_path: ToyPairs}\n"
    "data: {class_path: ShapesDataModule, init_args: {image_size: 16, batch_size: 8, length: 16, eval_length: 8, "
    "vocab_size: 200, max_tokens: 16, num_workers: 0}}\n" + TRAINER,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the package, and the record that `pip install` writes beside it."""
    folder = tmp_path_factory.mktemp("project")
    package = folder / "other_package"
    package.mkdir()
    for name in ("toy_method", "toy_pairs"):
        shutil.copy(FILES / f"{name}.py", package)
    (package / "__init__.py").write_text(
        "from .toy_method import ToyData, ToyMethod\nfrom .toy_pairs import ToyPairs\n"
    )
    record = folder / "other_package-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(
        "[vlightning.methods]\ntoy = other_package.toy_method:ToyMethod\ntoy_pairs = other_package.toy_pairs:ToyPairs\n"
    )
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    return folder


def vlightning(folder, *words):
    """Run a command in a process of its own, whose path begins with the folder."""
    done = run_script(["-m", "vlightning.cli", *map(str, words)], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def checkpoint(folder, name):
    """The last checkpoint of a run."""
    (path,) = (folder / name).rglob("last.ckpt")
    return path


def fit(folder, config, name, *words):
    logger = ("--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", f"--trainer.logger.name={name}")
    vlightning(folder, "fit", f"--config={folder / config}", *logger, *words)
    return checkpoint(folder, name)


@pytest.fixture(scope="module")
def toy(project):
    return fit(project, "toy.yaml", "toy_run")


@pytest.fixture(scope="module")
def pairs(project):
    return fit(project, "pairs.yaml", "pairs_run")


def test_the_lists_name_the_method(project):
    listed = vlightning(project, "methods")
    assert "toy (ToyMethod)\n  A sixth method in one file" in listed
    assert "toy_pairs (ToyPairs)\n  A method of image-text pairs in one file" in listed
    assert "ToyMethod" in vlightning(project, "fit", "--help")
    assert "The configs of toy are those of the package other_package" in vlightning(project, "configs", "toy")


def test_a_checkpoint_resumes_and_validates(project, toy):
    again = fit(project, "toy.yaml", "toy_again", "--ckpt_path", toy, "--trainer.max_epochs=2")
    content = torch.load(again, weights_only=True)
    assert content["global_step"] == 2 * torch.load(toy, weights_only=True)["global_step"]
    out = vlightning(project, "validate", "--config=toy.yaml", "--ckpt_path", toy, "--trainer.logger=false")
    assert "val/top1" in out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["toy", "pairs"])
def test_two_processes_train_it(project, strategy, name):
    words = ["-m", "vlightning.cli", "fit", f"--config={project / name}.yaml"]
    words += [f"--config={ROOT}/configs/strategy/{strategy}.yaml", "--trainer.devices=2", "--trainer.logger=CSVLogger"]
    words += [f"--trainer.logger.save_dir={project}", f"--trainer.logger.name={name}_{strategy}"]
    for done in run_ranks(words, cwd=project):
        assert done.returncode == 0, done.stdout + done.stderr
    written = checkpoint(project, f"{name}_{strategy}")
    target = project / f"{name}_of_{strategy}"
    vlightning(project, "export", written, target)
    trained = {"toy": "scale", "pairs": "student.logit_scale"}[name]
    assert load_file(target / "model.safetensors")[trained] != 1  # which it starts with


@pytest.mark.parametrize("name", ["toy", "pairs"])
def test_plan_counts_a_step(project, name):
    out = vlightning(project, "plan", f"--config={name}.yaml", "--steps=10")
    assert f"{'ToyMethod' if name == 'toy' else 'ToyPairs'}: " in out
    assert "TFLOP of a process in a step" in out
    assert "10 steps: " in out


def test_export_writes_the_folder_and_the_methods_own_layout(project, toy):
    vlightning(project, "export", toy, project / "folder")
    vlightning(project, "export", toy, project / "student.safetensors", "--layout=student")
    state = torch.load(toy, weights_only=True)["state_dict"]
    for name, value in load_file(project / "student.safetensors").items():
        assert torch.equal(value, state[f"student.{name}"])
    assert torch.equal(load_file(project / "folder/model.safetensors")["scale"], state["scale"])
    assert "student: a .safetensors file of the student's layers" in " ".join(
        vlightning(project, "export", "--help").split()
    )


def test_evaluate_and_from_pretrained_read_it(project, pairs):
    (project / "photos").mkdir()
    for number in range(3):
        draw_image(number).save(project / f"photos/{number}.png")
    vlightning(project, "export", pairs, project / "exported")
    words = ("--images=photos", "--classes", "a red circle", "a blue square", "--num_workers=0")
    for model in (pairs, "exported"):
        out = vlightning(project, "evaluate", "--model", model, *words)
        assert "Classified 3 images" in out
        (project / "classes.parquet").unlink()
    script = "from vlightning.commands.export import from_pretrained as read; print(read('exported').model)"
    (project / "read.py").write_text(script)
    done = run_script([project / "read.py"], cwd=project)
    assert done.stdout.startswith("ToyPairs("), done.stderr


def test_a_package_that_cannot_be_imported_is_named(project, tmp_path):
    shutil.copytree(project, tmp_path / "broken", ignore=shutil.ignore_patterns("*_run", "*.ckpt"))
    (tmp_path / "broken/other_package/__init__.py").write_text("import a_missing_library")
    done = run_script(["-m", "vlightning.cli", "fit", "--config=toy.yaml"], cwd=tmp_path / "broken")
    assert done.returncode == 2
    assert (
        "Expected the method other_package.toy_method:ToyMethod of the installed package other-package" in done.stderr
    )
    assert "No module named 'a_missing_library'" in done.stderr
