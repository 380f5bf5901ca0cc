"""Peak memory of a step of every method beside `vlightning plan`'s, and the largest batch that fits.

Whole batches, and slices of 64 pairs.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import Case, chosen
from runs import TOY_IMAGES, release, train
from setting import Setting

from vlightning.planning.estimate import estimate
from vlightning.planning.module import start

SLICE = 64


def main() -> None:
    """Write the table."""
    setting = Setting.parsed(__doc__)
    if setting.pretend:
        setting.say("A CPU has no counter of memory, and no limit that a trial may reach: the columns stay 0.\n")
    table = setting.table(("step", "images", "way", "peak GiB", "planned GiB", "largest batch tried that fits"))
    for name, case in chosen(setting.only).items():
        for way in ("whole", f"slices of {SLICE}"):
            images = TOY_IMAGES if setting.pretend else case.images
            try:
                changes = None if way == "whole" else in_slices(2 if setting.pretend else SLICE)
                clock = train(setting, case, images=images, steps=3, changes=changes)
                largest = images if setting.pretend else largest_batch(setting, case, images, changes)
                expected = planned(setting, case, images, None if way == "whole" else in_slices(SLICE))
                table.row(name, images, way, clock.peak / 2**30, expected / 2**30, largest)
            except Exception as error:
                table.failed(f"{name}, {way}", error)
            release(setting)


def planned(setting: Setting, case: Case, images: int, changes: Any) -> float:
    """Return the bytes that `vlightning plan` computes for a step of one process."""
    with tempfile.TemporaryDirectory() as folder:
        module = case.build(Path(folder), setting.pretend)
        if changes is not None:
            changes(module)
        batch = case.batch(2, setting.pretend)
        data: dict[str, Any] = {"image_size": batch["image"].shape[-1]}
        if "input_ids" in batch:
            data["max_tokens"] = batch["input_ids"].shape[1]
        start(module)
        return sum(estimate(module, data, 1, "bf16-mixed").memory(images, sharded=False).values())


def in_slices(pairs: int) -> Any:
    """Return a function that sets `memory.micro_batch_size` of a module.

    Raises:
        ValueError: in that function, if the method has no such setting.
    """

    def change(module: Any) -> None:
        if not hasattr(module, "memory"):
            raise ValueError("this method has no slices")
        module.memory = dataclasses.replace(module.memory, micro_batch_size=pairs)

    return change


def largest_batch(setting: Setting, case: Case, images: int, changes: Any) -> int:
    """Double the batch until it does not fit, at most five times."""
    for _ in range(5):
        try:
            train(setting, case, images=2 * images, steps=1, changes=changes)
        except torch.cuda.OutOfMemoryError:
            break
        finally:
            release(setting)
        images *= 2
    return images


if __name__ == "__main__":
    main()
