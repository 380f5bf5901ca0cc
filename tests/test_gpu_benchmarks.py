"""`benchmarks/gpu.sh --pretend` runs its parts on a CPU, so that nothing in them is untried but the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pretended(folder, *words):
    environment = os.environ | {"OUT": str(folder), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", ROOT / "benchmarks/gpu.sh", "--pretend", *words], env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_parts_write_their_tables(tmp_path):
    ran = pretended(tmp_path, "--only=shre", "throughput", "memory", "profiles")
    assert ran.returncode == 0, ran.stdout
    rows = {}
    for part in ("throughput", "memory", "profiles"):
        text = (tmp_path / "gpu" / f"{part}.md").read_text()
        assert text.startswith("CPU, toy sizes (pretended); Python 3.")
        rows[part] = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    ways = [row.split(" | ")[2] for row in rows["throughput"][1:]]
    assert ways == ["eager", "eager, batch copied from the host", "compiled"]
    assert all(float(row.split(" | ")[3]) > 0 for row in rows["throughput"][1:])
    assert all(float(row.split(" | ")[4]) > 0 for row in rows["memory"][1:])
    assert [row.split(" | ")[2] for row in rows["memory"][1:]] == ["whole", "slices of 64"]
    assert len(rows["profiles"]) == 7
    assert "Error" not in "".join(map("".join, rows.values()))


def test_without_a_device_it_says_what_to_do(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    words = ["bash", ROOT / "benchmarks/gpu.sh", "memory"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Expected a CUDA device, got none: add --pretend" in ran.stdout
