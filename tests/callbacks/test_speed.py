"""The share of a device's highest rate that a training reaches."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from support.methods.tiny import TinyData, TinyModel
from support.runs.command_line import run, tiny_config
from vlightning.callbacks import CompileCallback, SpeedMonitor, StarvedStepWarning, speed
from vlightning.callbacks.speed import CountFlops, ThreadTimes, peak_flops, thread_times

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


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_has_the_same_operations_by_each_kernel(kernel, masked):
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    key, value = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool) if masked else None
    with sdpa_kernel(kernel):
        with CountFlops() as forward:
            loss = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).sum()
        with CountFlops() as backward:
            loss.backward()
        with CountFlops() as frozen, torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    product = 2 * 2 * 3 * 5 * 7 * 8
    assert (forward.flops, backward.flops, frozen.flops) == (2 * product, 4 * product, 2 * product)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_a_gpu_does_not_count_the_scores_that_it_computes_again(kernel):
    rest = {"flash": (), "efficient": (None, True), "cudnn": (None, True)}[kernel]
    function = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    query, key = (torch.empty(2, 3, rows, 8, device="meta", dtype=torch.float16) for rows in (5, 7))
    query.requires_grad_()
    with CountFlops() as forward:
        attended = function(query, key, key, *rest)[0]
    with CountFlops() as backward:
        attended.sum().backward()
    product = 2 * 2 * 3 * 5 * 7 * 8
    assert (forward.flops, backward.flops) == (2 * product, 4 * product)


def starved(monkeypatch, capsys, *readings, **options) -> str:
    """Warnings of a fit of four steps, two epochs with validations, in which the times of threads are these."""
    left = iter(readings)
    monkeypatch.setattr(speed, "thread_times", lambda: next(left))
    fit(TinyModel(), StarvedStepWarning(0.25, seconds=0), limit_train_batches=2, log_every_n_steps=1, **options)
    assert next(left, None) is None
    return capsys.readouterr().err


def test_steps_that_wait_for_a_processor_are_reported_once(monkeypatch, capsys):
    none, much, more = ({"1": ThreadTimes(ran, waited)} for ran, waited in ((1, 1), (3.8, 2.2), (4, 9)))
    # Read by the constructor, after the sanity check, at the start and after a step; after the warning by validations.
    printed = starved(monkeypatch, capsys, none, none, none, much, more, more)
    assert printed.count("waited for a processor for 30% of their time") == 1
    assert "start with OMP_WAIT_POLICY=passive" in printed


def test_validations_and_threads_that_end_or_begin_do_not_count(monkeypatch, capsys):
    idle = {"1": ThreadTimes(1, 1)}
    other = {"1": ThreadTimes(4, 1.9), "2": ThreadTimes(0, 50)}
    after = {"1": ThreadTimes(4, 99)}  # of the validation
    last = {"1": ThreadTimes(9, 99)}
    readings = [*[idle] * 3, other, other, after, *[last] * 3]
    assert starved(monkeypatch, capsys, *readings) == ""


@pytest.mark.skipif(not thread_times(), reason="the system does not count what threads wait")
def test_a_thread_beside_another_one_on_one_processor_waits_half_of_its_time(monkeypatch):
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        before = thread_times()[str(os.getpid())]
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
        after = thread_times()[str(os.getpid())]
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, processors)
    assert after.ran - before.ran >= 0.4
    assert after.waited - before.waited > 0.25 * (after.ran - before.ran)


def test_operations_in_inference_mode_are_those_without_gradients():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 5))
    counted = []
    for mode in (torch.no_grad, torch.inference_mode):
        with CountFlops() as counting, mode():
            result = network(torch.ones(2, 3, 8, 8))
            torch.matmul(result, result.T)
        counted.append(counting.flops)
    assert counted == [2 * 2 * (4 * 36 * 27 + 144 * 5) + 2 * 2 * 2 * 5] * 2
