"""The operators that take most of a step of every method, and the gaps in which the device waits for the host."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from cases import CASES, chosen
from lightning.pytorch import Callback
from runs import release, train
from setting import Setting
from torch.profiler import ProfilerActivity, profile

TOP, LONG = 6, 50.0  # operators; microseconds


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
    """Write two tables for each method."""
    setting = Setting.parsed(__doc__)
    for name in chosen(setting):
        setting.say(f"\n{name}\n")
        table = setting.table(("kernel", "calls", "share of the busy time"))
        setting.measured("profile", 25.0, partial(one, setting, table, name), table, name)
        release(setting)


def one(setting: Setting, table: Any, name: str) -> None:
    """Profile a method: its kernels, then its gaps."""
    profiled = Profiled(setting, 2 if setting.pretend else 5)
    train(setting, CASES[name], [profiled], steps=3)
    key = "self_cpu_time_total" if setting.pretend else "self_device_time_total"
    on_device = torch.autograd.DeviceType.CUDA
    # Kernels only: an operator's own row, and a range such as the optimizer's, have the same time on the device again.
    kernels = [
        row
        for row in profiled.profile.key_averages()
        if setting.pretend or (row.device_type == on_device and not row.is_user_annotation)
    ]
    total = sum(getattr(row, key) for row in kernels) / 1e6
    for row in sorted(kernels, key=lambda row: getattr(row, key), reverse=True)[:TOP]:
        table.row(_short(row.key), row.count, f"{getattr(row, key) / 1e6 / total:.1%}")
    events = [
        event
        for event in profiled.profile.events()
        if setting.pretend or (event.device_type == on_device and not event.is_user_annotation)
    ]
    gaps = list(gaps_between((e.time_range.start, e.time_range.end, e.name) for e in events))
    long = sorted((gap for gap in gaps if gap[0] > LONG), reverse=True)
    lost = sum(length for length, _ in long) / 1e6
    setting.say(
        f"\n{profiled.wall * 1e3:.0f} ms for three steps with the profiler, {total / profiled.wall:.0%} of it busy; "
        f"{len(long)} gaps of more than {LONG:.0f} us, {lost / profiled.wall:.0%} of the time. The longest:\n"
    )
    waits = setting.table(("us", "before"))
    for length, after in long[:3]:
        waits.row(f"{length:.0f}", _short(after))


def gaps_between(events: Iterable[tuple[float, float, str]]) -> Iterable[tuple[float, str]]:
    """Yield the microseconds in which no event runs, with the event that ends them."""
    busy_until = None
    for begin, end, name in sorted(events):
        if busy_until is not None and begin > busy_until:
            yield begin - busy_until, name
        busy_until = end if busy_until is None else max(busy_until, end)


def _short(name: str) -> str:
    return name[:90].replace("|", "/")


if __name__ == "__main__":
    main()
