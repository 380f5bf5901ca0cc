"""The wheel contains one package, runs from any folder, and is visible to type checkers; a release is checked."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from packaging.requirements import Requirement

import vlightning.callbacks
import vlightning.datamodules
import vlightning.lightning_modules
from support.project.wheel import NOT_COPIED, ROOT, built_wheel, run_mypy

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CODE_FOLDERS = ("callbacks", "commands", "common", "datamodules", "lightning_modules", "metrics")


def package_files() -> list[Path]:
    """Python files that belong to the package, relative to the root."""
    files = [Path("__init__.py"), Path("api.py"), Path("cli.py")]
    for folder in CODE_FOLDERS:
        files += [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
    return files


def test_every_folder_with_code_is_in_the_list_of_packages():
    folders = {path.parent for path in package_files()}
    expected = {"vlightning" if str(f) == "." else f"vlightning.{'.'.join(f.parts)}" for f in folders}
    assert expected == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_at_the_root_is_known():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("**/*.py"))}
    # Among the configs are templates for engines, which are started as files.
    others = {"tests", "benchmarks", "docs", "configs"}
    unknown = {name for name in folders if not name.startswith(".")} - {*CODE_FOLDERS, *others}
    assert unknown <= {"build", "dist"}


def test_every_imported_distribution_is_declared():
    declared = {Requirement(line).name.lower().replace("_", "-") for line in PROJECT["project"]["dependencies"]}
    owners = packages_distributions()
    imported = set()
    for file in package_files():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    optional = {  # in extras, imported where they are used; the demo's server is what Gradio itself runs on
        *("onnxruntime", "peft", "torchcodec", "usearch", "optuna"),
        *("gradio", "fastapi", "starlette", "uvicorn"),
        *("coremltools", "executorch"),  # in environments of their own, which an export makes
    }
    missing = {
        name: owners[name]
        for name in imported - set(sys.stdlib_module_names) - {"vlightning"} - optional
        if not declared & {owner.lower().replace("_", "-") for owner in owners[name]}
    }
    assert missing == {}


def test_every_dependency_has_a_lower_bound_with_a_reason():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *(requirement for extra in extras for requirement in extra)]
    for requirement in requirements:
        assert ">=" in requirement or requirement.startswith("vlightning[")
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(f'"{requirement}"'))
        assert "#" in lines[at] or lines[at - 1].strip().startswith("#"), f"{requirement} gives no reason"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the libraries of the running one but not its editable install."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*pip, str(built_wheel())], check=True, timeout=300)
    # A path in a .pth file is searched, but the .pth files inside it, the editable install's among them, are not read.
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "libraries.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder


# A start takes ten seconds: what is asked of the installed package is asked in one process.
ASKED = """
import contextlib, importlib, io, json, runpy, sys

script, asked = sys.argv[1], json.loads(sys.argv[2])
found = {"importable": [], "ran": []}
for name in asked["names"]:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
        found["importable"].append(name)
for words in asked["commands"]:
    out, err, status = io.StringIO(), io.StringIO(), None
    sys.argv = [script, *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
    found["ran"].append((status, out.getvalue(), err.getvalue()))
import vlightning.cli
print(json.dumps(found | {"version": vlightning.__version__, "file": vlightning.cli.__file__}))
"""
NAMES = (*CODE_FOLDERS, "cli", "tests")
COMMANDS = (
    ("--version",),
    ("--help",),
    ("fit", "--config", "configs/albef/quickstart.yaml", "--print_config"),
    ("fit", "--config", "configs/albef/quikstart.yaml"),
)


@pytest.fixture(scope="module")
def answered(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the installed package and its command say in a folder that is not the repository."""
    binaries, asked = installed / "bin", json.dumps({"names": NAMES, "commands": COMMANDS})
    command = [str(binaries / "python"), "-c", ASKED, str(binaries / "vlightning"), asked]
    folder = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_wheel_holds_only_the_package():
    names = zipfile.ZipFile(built_wheel()).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vlightning"}
    for path in package_files():
        assert f"vlightning/{path}" in names
    configs = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    assert configs
    for path in configs:
        assert f"vlightning/{path}" in names
    assert "vlightning/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_installed_folders_are_not_top_level_packages(installed: Path, answered: dict[str, Any]):
    assert Path(answered["file"]).is_relative_to(installed)
    assert answered["importable"] == []


@pytest.mark.slow
def test_installed_the_version_is_that_of_the_wheel(answered: dict[str, Any]):
    assert answered["version"] == PROJECT["project"]["version"]
    assert answered["ran"][0][:2] == [0, f"vlightning {answered['version']}\n"]


@pytest.mark.slow
def test_installed_the_command_runs_and_finds_the_shipped_configs(installed: Path, answered: dict[str, Any]):
    first = (installed / "bin" / "vlightning").read_text().splitlines()[0]
    assert first == f"#!{installed / 'bin' / 'python'}"
    _, (status, out, err), (printed, config, _), (mistaken, _, sentence) = answered["ran"]
    assert status == 0, err
    assert "fit" in out
    assert printed == 0
    assert "ALBEFModule" in config
    assert mistaken == 2
    assert "configs/albef/quickstart.yaml" in sentence


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with the script that builds a release."""
    folder = tmp_path_factory.mktemp("release") / "source"
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    return folder


def build_release(folder: Path, tag: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(folder / ".ci" / "release"), tag, "--no-isolation"]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_release_is_an_sdist_and_a_wheel_that_holds_the_same(release: Path):
    """`.ci/release` builds the wheel from the sdist: what the sdist lacks, the wheel would lack too."""
    done = build_release(release, f"v{PROJECT['project']['version']}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    wheel, sdist = sorted((release / "dist").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert sdist.name == f"vlightning-{PROJECT['project']['version']}.tar.gz"
    assert set(zipfile.ZipFile(wheel).namelist()) == set(zipfile.ZipFile(built_wheel()).namelist())


@pytest.mark.parametrize(
    ("tag", "file", "old", "new", "sentence"),
    [
        ("v9.9.9", None, "", "", "the tag is v9.9.9, the version of pyproject.toml"),
        (None, "CITATION.cff", "\nversion: ", "\nversion: 9.", "CITATION.cff has not the version"),
        (None, "CHANGELOG.md", "## {} - ", "## {}, ", "CHANGELOG.md has no entry"),
    ],
)
def test_a_release_whose_files_disagree_is_refused(
    tag: str | None, file: str | None, old: str, new: str, sentence: str, tmp_path: Path
):
    version = PROJECT["project"]["version"]
    (tmp_path / ".ci").mkdir()
    for name in (".ci/release", "pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    if file is not None:
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text(text.replace(old.format(version), new.format(version), 1))
    done = build_release(tmp_path, tag or f"v{version}")
    assert done.returncode == 1
    assert done.stderr.startswith(".ci/release: ")
    assert sentence in done.stderr
    assert not (tmp_path / "dist").exists()


def test_the_recipe_of_conda_requires_what_the_package_does():
    other_names = {"torch": "pytorch", "jsonargparse[signatures]": "jsonargparse-signatures"}
    other_names |= {"open_clip_torch": "open-clip-torch", "matplotlib": "matplotlib-base", "PyYAML": "pyyaml"}
    expected = {"python " + PROJECT["project"]["requires-python"]}
    for line in PROJECT["project"]["dependencies"]:
        name, bound = re.fullmatch(r"([^>]+)(>=.+)", line).groups()
        expected.add(f"{other_names.get(name, name)} {bound}")
    recipe = yaml.safe_load((ROOT / ".ci/conda_recipe.yaml").read_text())
    assert set(recipe["requirements"]["run"]) == expected
    assert recipe["context"]["version"] == PROJECT["project"]["version"]
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command == "vlightning = {}".format(PROJECT["project"]["scripts"]["vlightning"])


def test_the_image_is_built_from_the_whole_package():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name}
    assert sent >= packages | {"pyproject.toml", "README.md", "LICENSE", "__init__.py", "cli.py", "py.typed", "configs"}
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


WRONG = """\
from vlightning.callbacks import EMACallback
from vlightning.cli import main
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import ALBEFModule

EMACallback(pairs=3)
ShapesDataModule(batch_size="many")
ALBEFModule(weights=3)
main(args=3)
"""


@pytest.mark.slow
def test_a_type_checker_sees_a_wrong_argument(tmp_path: Path):
    """Type checks of an editable install see no types; those of the wheel must report errors."""
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(WRONG.split("\n\n")[0] + "\n\nShapesDataModule(batch_size=4)\nmain(args=[])\n")
    done = run_mypy("wrong.py", "right.py", folder=tmp_path)
    errors = [line for line in done.stdout.splitlines() if line.startswith(("wrong.py", "right.py"))]
    assert [line.split(":")[0:2] for line in errors] == [["wrong.py", str(n)] for n in (6, 7, 8, 9)], done.stdout
    assert all("[arg-type]" in line for line in errors)


def public_classes(package: ModuleType, base: type) -> list[type]:
    return [
        value
        for value in (getattr(package, name) for name in package.__all__)
        if inspect.isclass(value) and issubclass(value, base)
    ]


CLASSES = [
    *public_classes(vlightning.lightning_modules, LightningModule),
    *public_classes(vlightning.datamodules, LightningDataModule),
    *public_classes(vlightning.callbacks, Callback),
]


def test_there_are_classes_to_check():
    names = {cls.__name__ for cls in CLASSES}
    assert {"ALBEFModule", "ImageTextDataModule", "ShapesDataModule", "EMACallback", "QueueCallback"} <= names


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_constructor_argument_is_typed(cls: type):
    """jsonargparse accepts anything for an untyped argument, so a typo in a value would go through."""
    for name, parameter in inspect.signature(cls).parameters.items():
        assert parameter.annotation is not parameter.empty, f"{cls.__name__}({name}) has no type"
