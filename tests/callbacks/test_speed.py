"""The share of a device's highest rate that a training reaches."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from support.methods.tiny import TinyData, TinyModel
from support.runs.command_line import run, tiny_config
from vlightning.callbacks import CompileCallback, SpeedMonitor, speed
from vlightning.callbacks.speed import CountFlops, peak_flops

SAMPLE = 2 * (2 * 3 * 5) + 3 * (2 * 5)
"""Operations of a sample in layers of 3 x 5 and 5 x 1 weights: the gradient of the input is not computed."""
CPU = torch.device("cpu")


def rows(folder: Path) -> list[dict[str, str]]:
    """Rows of the log of training steps."""
    (file,) = folder.rglob("metrics.csv")
    with file.open(newline="") as opened:
        return [row for row in csv.DictReader(opened) if row["train/samples_per_second"]]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_mfu_is_the_share_of_the_rate_that_is_given(tmp_path, monkeypatch, accumulated):
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.log_every_n_steps=1"]
    words += [f"--trainer.accumulate_grad_batches={accumulated}"]
    own = ["--trainer.callbacks+=SpeedMonitor", "--trainer.callbacks.peak_flops=2e9"]
    ran = run("fit", "--config", tiny_config(tmp_path), *words, *own)
    assert ran.status == 0, ran.err
    logged = rows(tmp_path)
    assert logged
    for row in logged:
        assert float(row["train/mfu"]) == pytest.approx(SAMPLE * float(row["train/samples_per_second"]) / 2e9)


def test_nothing_is_counted_or_logged_without_a_known_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "CountFlops", None)  # cannot be called
    words = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.log_every_n_steps=1"]
    ran = run("fit", "--config", tiny_config(tmp_path), *words)
    assert ran.status == 0, ran.err
    assert all("train/mfu" not in row for row in rows(tmp_path))


def fit(model: TinyModel, *callbacks, **options) -> Trainer:
    quiet = {"enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", logger=False, max_epochs=2, callbacks=list(callbacks), **quiet, **options)
    trainer.fit(model, TinyData(batch_size=4))
    return trainer


def test_one_batch_is_counted(monkeypatch):
    counted = []
    monkeypatch.setattr(speed, "CountFlops", lambda: counted.append(CountFlops()) or counted[-1])
    assert fit(TinyModel(dim=5), SpeedMonitor(1e9)).global_step == 8
    (one,) = counted
    assert one.flops == 4 * SAMPLE


def test_compiled_networks_are_not_counted(monkeypatch):
    monkeypatch.setattr(speed, "CountFlops", None)
    fit(TinyModel(), CompileCallback(backend="eager"), SpeedMonitor(1e9), limit_train_batches=1)
    fit(torch.compile(TinyModel(), backend="eager"), SpeedMonitor(1e9), limit_train_batches=1)
    model = TinyModel()
    model.head = torch.compile(model.head, backend="eager")
    fit(model, SpeedMonitor(1e9), limit_train_batches=1)


def test_an_operation_that_torch_cannot_count_leaves_the_training_alone(monkeypatch):
    def fails(*_, **__):
        raise AssertionError("inner dimensions")

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, fails)
    speeds = SpeedMonitor(1e9)
    assert fit(TinyModel(dim=5), speeds).global_step == 8
    assert speeds.mfu(1.0) is None


class Fails(TinyModel):
    def training_step(self, batch, batch_idx):
        raise InterruptedError


class Skips(TinyModel):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


def test_counting_ends_with_a_step_that_fails_or_is_skipped():
    with pytest.raises(InterruptedError):
        fit(Fails(), SpeedMonitor(1e9))
    assert _get_current_dispatch_mode() is None
    fit(Skips(), SpeedMonitor(1e9))
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("NVIDIA H100 80GB HBM3", (989e12, 67e12, 494e12)),
        ("NVIDIA H200", (989e12, 67e12, 494e12)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 19.5e12, 156e12)),
        ("NVIDIA A100 80GB PCIe", (312e12, 19.5e12, 156e12)),
        ("NVIDIA A100-PCIE-40GB", (312e12, 19.5e12, 156e12)),
        ("NVIDIA L40S", (362e12, 91.6e12, 183e12)),
        ("Tesla V100-SXM2-16GB", (None, 15.7e12, 15.7e12)),  # bfloat16 is not computed by its tensor cores
        ("Tesla T4", (None, 8.1e12, 8.1e12)),
        ("NVIDIA L4", (121e12, 30.3e12, 60e12)),
        ("NVIDIA A10", (125e12, 31.2e12, 62.5e12)),
        ("NVIDIA RTX A6000", (154.8e12, 38.7e12, 77.4e12)),
        ("NVIDIA GeForce RTX 3090", (71e12, 35.6e12, 35.6e12)),
        ("NVIDIA GeForce RTX 4090", (165.2e12, 82.6e12, 82.6e12)),
        ("NVIDIA GeForce RTX 5090", (209.5e12, 104.8e12, 104.8e12)),
        ("NVIDIA B200", (2250e12, 75e12, 1125e12)),
        ("NVIDIA A10G", (None, None, None)),
        ("NVIDIA H100 PCIe", (None, None, None)),  # others than those of the SXM
        ("NVIDIA H200 NVL", (None, None, None)),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (None, None, None)),
        ("NVIDIA L40", (None, None, None)),
    ],
)
def test_the_rate_is_that_of_the_gpu_and_the_precision(name, rates, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    precisions = (("bf16-mixed", "highest"), ("32-true", "highest"), ("32-true", "high"))
    for (precision, products), rate in zip(precisions, rates, strict=True):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda products=products: products)
        assert peak_flops(torch.device("cuda", 0), precision) == rate
    assert peak_flops(torch.device("cuda", 0), "64-true") is None


def test_a_cpu_has_no_rate():
    assert peak_flops(CPU, "32-true") is None


def test_a_rate_that_is_not_positive_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["--trainer.callbacks+=SpeedMonitor", "--trainer.callbacks.peak_flops=-1"]
    ran = run("fit", "--config", tiny_config(tmp_path), *own)
    assert ran.status
    assert "Expected peak_flops of SpeedMonitor of more than 0, got -1" in ran.sentence


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.ConvTranspose2d(8, 12, 4, stride=2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 12, 4, groups=4),
    ],
)
def test_a_convolution_costs_three_times_its_forward_pass_with_any_number_of_groups(layer):
    image = torch.randn(2, 8, 9, 9, requires_grad=True)
    with CountFlops() as forward:
        loss = layer(image).sum()
    with CountFlops() as backward:
        loss.backward()
    assert forward.flops > 0
    assert backward.flops == 2 * forward.flops
