"""The wheel contains one package, runs from any folder, and is visible to type checkers."""

import ast
import inspect
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from packaging.requirements import Requirement

import vlightning.callbacks
import vlightning.datamodules
import vlightning.lightning_modules
from support.wheel import ROOT, built_wheel, run_mypy

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CODE_FOLDERS = ("callbacks", "cli_support", "common", "datamodules", "lightning_modules", "metrics")


def package_files() -> list[Path]:
    """Python files that belong to the package, relative to the root."""
    files = [Path("__init__.py"), Path("cli.py")]
    for folder in CODE_FOLDERS:
        files += [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
    return files


def test_every_folder_with_code_is_in_the_list_of_packages():
    folders = {path.parent for path in package_files()}
    expected = {"vlightning" if str(f) == "." else f"vlightning.{'.'.join(f.parts)}" for f in folders}
    assert expected == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_at_the_root_is_known():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("**/*.py"))}
    unknown = {name for name in folders if not name.startswith(".")} - {*CODE_FOLDERS, "tests", "benchmarks"}
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
    optional = {"onnxruntime"}  # in the extra `onnx`, imported where such a file is written
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


def run_in(installed: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess:
    done = [str(installed / "bin" / command[0]), *command[1:]]
    return subprocess.run(done, cwd=cwd, capture_output=True, text=True, timeout=300)


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
def test_installed_folders_are_not_top_level_packages(installed: Path, tmp_path: Path):
    where = run_in(installed, "python", "-c", "import vlightning.cli; print(vlightning.cli.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed), where.stdout + where.stderr
    for name in (*CODE_FOLDERS, "cli", "tests"):
        done = run_in(installed, "python", "-c", f"import {name}", cwd=tmp_path)
        assert done.returncode != 0
        assert "ModuleNotFoundError" in done.stderr


@pytest.mark.slow
def test_installed_the_version_is_that_of_the_wheel(installed: Path, tmp_path: Path):
    code = "import vlightning; print(vlightning.__version__, vlightning.__file__)"
    done = run_in(installed, "python", "-c", code, cwd=tmp_path)
    version, file = done.stdout.split()
    assert version == PROJECT["project"]["version"]
    assert Path(file).is_relative_to(installed)
    shown = run_in(installed, "vlightning", "--version", cwd=tmp_path)
    assert shown.stdout == f"vlightning {version}\n"


@pytest.mark.slow
def test_installed_the_command_runs_and_finds_the_shipped_configs(installed: Path, tmp_path: Path):
    done = run_in(installed, "vlightning", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fit" in done.stdout
    words = ("fit", "--config", "configs/albef/quickstart.yaml", "--print_config")
    done = run_in(installed, "vlightning", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ALBEFModule" in done.stdout
    done = run_in(installed, "vlightning", "fit", "--config", "configs/albef/quikstart.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "configs/albef/quickstart.yaml" in done.stderr


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
