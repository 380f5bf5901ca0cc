"""The operators that take most of a step of every method, the share of the averages and queues, and idle time."""

import time
from typing import Any

import torch
from cases import chosen
from lightning.pytorch import Callback
from runs import release, train
from setting import Setting
from torch.profiler import ProfilerActivity, profile

TOP = 6


class Profiled(Callback):
    """Profiles three steps after the warm-up."""

    def __init__(self, setting: Setting, first: int) -> None:
        self.setting = setting
        self.first = first
        activities = [ProfilerActivity.CPU] if setting.pretend else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        self.profile = profile(activities=activities)
        self.wall = self.start = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start at the first of the steps."""
        if batch_idx == self.first:
            self.setting.wait()
            self.profile.__enter__()
            self.start = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop after the last step."""
        self.setting.wait()
        self.wall = time.perf_counter() - self.start
        self.profile.__exit__(None, None, None)


def main() -> None:
    """Write a table for each method."""
    setting = Setting.parsed(__doc__)
    for name, case in chosen(setting.only).items():
        profiled = Profiled(setting, 2 if setting.pretend else 5)
        try:
            train(setting, case, [profiled], steps=3)
        except Exception as error:
            setting.say(f"\n{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        finally:
            release(setting)
        rows = profiled.profile.key_averages()
        key = "self_cpu_time_total" if setting.pretend else "self_device_time_total"
        # Kernels only: an operator's own row has the same time on the device again.
        kernels = [row for row in rows if setting.pretend or row.device_type == torch.autograd.DeviceType.CUDA]
        total = sum(getattr(row, key) for row in kernels) / 1e6
        setting.say(
            f"\n{name}: {profiled.wall * 1e3:.0f} ms with the profiler, {total / profiled.wall:.0%} of it busy\n"
        )
        table = setting.table(("kernel", "calls", "share of the busy time"))
        for row in sorted(kernels, key=lambda row: getattr(row, key), reverse=True)[:TOP]:
            table.row(row.key[:90].replace("|", "/"), row.count, f"{getattr(row, key) / 1e6 / total:.1%}")


if __name__ == "__main__":
    main()
