"""Counts of `benchmarks/cocord_cost.py` equal those of the paper's Tables 9 to 12."""

import re
import sys

import cocord_cost
import pytest
import torch
from memory import held_bytes

UNITS = {"M": 1e6, "G": 1e9}
NUMBERS = {
    name: (float(adds[:-1]) * UNITS[adds[-1]], int(thousands))
    for pair in cocord_cost.PAIRS
    for name, adds, thousands in zip(pair[:2], pair.multiply_adds.split("/"), pair.parameters.split("/"), strict=True)
}


@pytest.mark.parametrize("name", NUMBERS)
def test_multiply_adds_and_parameters_are_those_of_the_paper(name):
    found = cocord_cost.cost(name)
    adds, thousands = NUMBERS[name]
    if name == "ResNet50":  # the paper's has ImageNet's stem, with which 32 pixels need 83.67 million
        assert (found.parameters, round(found.multiply_adds / 1e6)) == (23_705_252, 1298)
        return
    assert found.multiply_adds == pytest.approx(adds, rel=0.005)  # the paper also counts biases
    assert found.parameters / 1e3 == pytest.approx(thousands, abs=0.5 if thousands < 10_000 else 5)


def test_resnet20_has_the_multiply_adds_of_its_layers():
    stages = [(16, 32), (32, 16), (64, 8)]
    adds, inputs = 3 * 16 * 9 * 32**2, 16
    for width, side in stages:
        adds += (inputs * width + 5 * width * width) * 9 * side**2
        adds += inputs * width * side**2 if inputs != width else 0  # the shortcut
        inputs = width
    found = cocord_cost.cost("resnet20")
    assert found.multiply_adds == adds + 64 * 100
    assert found.parameters == 278_324
    # The state dict also has a mean and a variance for each channel, and a counter for each BatchNorm.
    channels, norms = 16 + 6 * (16 + 32 + 64) + 32 + 64, 1 + 18 + 2
    assert found.size == 4 * (278_324 + 2 * channels) + 8 * norms


def test_banks_have_the_papers_bytes():
    assert cocord_cost.bank_bytes("CIFAR-100") == (51_200_000, 16_777_216)
    assert cocord_cost.bank_bytes("ImageNet") == (1_311_915_008, 536_870_912)


def test_allocated_memory_is_that_of_every_tensor_of_a_call():
    def call():
        torch.ones(1024)
        return torch.ones(1024)

    held = held_bytes(call)
    assert (held.total, held.most, held.after) == (8192, 4096, 4096)


def test_a_pair_is_a_row_of_the_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cost", "--pairs", "vgg13/MobileNetV2", "--repeats=1"])
    cocord_cost.main()
    lines = capsys.readouterr().out.splitlines()
    number = r"\d+\.\d\d/\d+\.\d\d"
    row = rf"\| vgg13/MobileNetV2 \| {number} \| 8\.72/14\.97 \| -?\d+\.\d% \| \d+\.\d\d \| 284\.94/6\.52 \| "
    row += rf"285\.2M/6\.54M \| {number} \| 4\.20/3\.39 \| {number} \| 9462/813 \| 9462/813 \| 37\.87/3\.33 \|"
    (line,) = (line for line in lines if line.startswith("| vgg13"))
    assert re.fullmatch(row, line), line
    header = next(line for line in lines if line.startswith("| teacher/student"))
    assert header.count("|") == line.count("|")
    assert lines[-2:] == ["| CIFAR-100 | 51.20 | 16.78 | 32.77% |", "| ImageNet | 1311.92 | 536.87 | 40.92% |"]
