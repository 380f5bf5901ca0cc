"""Peak memory of a step of every method beside `vlightning plan`'s, and the largest batch that fits.

Whole batches, and slices of 64 pairs.
"""

import dataclasses
import multiprocessing
import os
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CASES, chosen
from rivals import images_of
from runs import release, train
from setting import Setting, Table

from vlightning.commands.plan.estimate import estimate
from vlightning.commands.plan.module import start

SLICE = 64
WAYS = ("whole", f"slices of {SLICE}")


def main() -> None:
    """Write a table of peaks, and one of largest batches."""
    setting = Setting.parsed(__doc__)
    if setting.pretend:
        setting.say("A CPU has no counter of memory, and no limit that a trial may reach: the columns stay 0.\n")
    cases = [(name, way) for name in chosen(setting) for way in WAYS if way == "whole" or _slices(name)]
    with ExitStack() as stack:
        # A plan takes half a minute of one core, in a process of its own while the device measures.
        workers = max(1, min(len(cases), (os.cpu_count() or 2) - 2))
        context = multiprocessing.get_context("spawn")
        pool = None if setting.pretend else stack.enter_context(ProcessPoolExecutor(workers, context))
        plans = {case: pool.submit(planned, *case, False) if pool else None for case in cases}
        columns = ("step", "images", "way", "peak GiB", "planned GiB", "planned / peak (goal 0.9 to 1.1)")
        table = setting.table(columns)
        for name, way in cases:
            measure = partial(peak, setting, table, name, way, plans[name, way])
            setting.measured("peak", 20.0, measure, table, f"{name}, {way}")
            release(setting)
        setting.say("")
        table = setting.table(("step", "way", "largest batch tried that fits"))
        for name, way in cases:
            measure = partial(largest_batch, setting, table, name, way)
            setting.measured("largest", 40.0, measure, table, f"{name}, {way}")
            release(setting)
        if pool:
            pool.shutdown(cancel_futures=True)


def _slices(name: str) -> bool:
    return not name.startswith("CoCoRD")  # which has none


def peak(setting: Setting, table: Table, name: str, way: str, plan: "Future[float] | None") -> None:
    """Write the row of a measured and a planned peak."""
    images = images_of(setting, name)
    clock = train(setting, CASES[name], images=images, steps=3, changes=changes_of(way, setting.pretend))
    try:
        expected = planned(name, way, True) if plan is None else plan.result(timeout=max(1.0, setting.left()))
    except Exception as error:
        table.row(name, images, way, clock.peak / 2**30, f"{type(error).__name__}: {str(error)[:80]}")
        return
    ratio = f"{expected / clock.peak:.2f}" if clock.peak else ""
    table.row(name, images, way, clock.peak / 2**30, expected / 2**30, ratio)


def planned(name: str, way: str, pretend: bool) -> float:
    """Return the bytes that `vlightning plan` computes for a step of one process."""
    torch.set_num_threads(1)
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        module: Any = case.build(Path(folder), pretend)
        if (change := changes_of(way, False)) is not None:
            change(module)
        batch = case.batch(2, pretend)
        data: dict[str, Any] = {"image_size": batch["image"].shape[-1]}
        if "input_ids" in batch:
            data["max_tokens"] = batch["input_ids"].shape[1]
        start(module)
        images = 8 if pretend else case.images
        return sum(estimate(module, data, 1, "bf16-mixed").memory(images, sharded=False).values())


def changes_of(way: str, pretend: bool) -> Any:
    """Return the function that sets `memory.micro_batch_size` of a module; None for whole batches."""

    def change(module: Any) -> None:
        module.memory = dataclasses.replace(module.memory, micro_batch_size=2 if pretend else SLICE)

    return None if way == "whole" else change


def largest_batch(setting: Setting, table: Table, name: str, way: str) -> None:
    """Double the batch until it does not fit, at most six times, and write the row."""
    images, fits = images_of(setting, name), 0
    for _ in range(1 if setting.pretend else 7):
        try:
            train(setting, CASES[name], images=images, steps=1, warm_up=1, changes=changes_of(way, setting.pretend))
        except torch.cuda.OutOfMemoryError:
            break
        finally:
            release(setting)
        fits, images = images, 2 * images
        if setting.left() < 20:
            break
    table.row(name, way, fits)


if __name__ == "__main__":
    main()
