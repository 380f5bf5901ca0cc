"""`benchmarks/gpu.sh --pretend` runs its parts on a CPU, so that nothing in them is untried but the device.

They run without open_clip, jsonargparse and datasets, which only some methods and parts need.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("datasets", "jsonargparse", "open_clip"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""


PARTS = """
import runpy, sys

for part in ("throughput", "memory", "profiles"):  # in one process, since a start takes ten seconds
    sys.argv[1:] = ["--pretend", "--only=shre,mm-lg", "--out", f"gpu/{part}.md"]
    runpy.run_path(f"{sys.path[1]}/{part}.py", run_name="__main__")
"""


def pretended(folder, *words):
    """Run a command without some packages; return the rows of each table."""
    (folder / "sitecustomize.py").write_text(WITHOUT)
    (folder / "gpu").mkdir(exist_ok=True)
    path = os.pathsep.join(map(str, (ROOT / "benchmarks/gpu", ROOT / "benchmarks", ROOT / "tests", folder)))
    environment = {"OUT": str(folder), "PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    found = {}
    for file in (folder / "gpu").glob("*.md"):
        text = file.read_text()
        first = "CPU, toy sizes (pretended); missing packages: jsonargparse, datasets, open_clip_torch; Python 3."
        assert text.startswith(first)
        found[file.stem] = text, [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return found


@pytest.mark.slow
def test_the_parts_write_their_tables(tmp_path):
    found = pretended(tmp_path, sys.executable, "-c", PARTS)
    rows = {part: table for part, (_, table) in found.items()}
    assert [row[2] for row in rows["throughput"][1:]] == ["eager", "eager, loader included", "compiled"]
    assert all(float(row[3]) > 0 for row in rows["throughput"][1:])
    assert [row[2] for row in rows["memory"][1:3]] == ["whole", "slices of 64"]
    assert all(float(row[4]) > 0 for row in rows["memory"][1:3])
    assert len(rows["profiles"]) > 7
    for part, (text, _) in found.items():
        assert "\nLeft out, because open_clip is missing: MM-LG, extraction.\n" in text, part


@pytest.mark.slow
def test_the_tests_of_the_device_have_a_row_each(tmp_path):
    script = ROOT / "benchmarks/gpu.sh"
    _, rows = pretended(tmp_path, "bash", script, "--pretend", "--only=those_of_a_cpu", "tests")["tests"]
    assert rows[1] == ["lightning_modules/mobileclip/test_models.py", "left out: open_clip is missing"]
    names = {"albef": "passed", "cocord": "passed", "mmlg": "skipped", "mobileclip": "skipped", "shre": "passed"}
    test = "guarantees/faults/test_gpu.py::test_losses_are_those_of_a_cpu"
    expected = [[f"{test}[{name}]", word] for name, word in names.items()]
    assert rows[2:] == expected


def test_without_a_device_it_says_what_to_do(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    words = ["bash", ROOT / "benchmarks/gpu.sh", "tests"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Expected a CUDA device, got none: add --pretend" in ran.stdout


def test_a_source_tree_that_is_not_installed_has_a_version(tmp_path):
    asked = (
        "import importlib.metadata as m; d = m.distribution('vlightning'); "
        "print('version', d.version, 'site-packages' in str(d.locate_file('')))"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{asked}"\n')
    python.chmod(0o755)
    ran = subprocess.run(
        ["bash", ROOT / "benchmarks/gpu.sh", "--pretend", "tests"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": str(python), "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"version {version('vlightning')} False" in ran.stdout
