"""Peak memory of a step of every method, and the largest batch that fits, whole and in slices of 64 pairs."""

import dataclasses
from typing import Any

import torch
from cases import Case, chosen
from runs import TOY_IMAGES, release, train
from setting import Setting

SLICE = 64


def main() -> None:
    """Write the table."""
    setting = Setting.parsed(__doc__)
    if setting.pretend:
        setting.say("A CPU has no counter of memory, and no limit that a trial may reach: the columns stay 0.\n")
    table = setting.table(("step", "images", "way", "peak GiB", "largest batch tried that fits"))
    for name, case in chosen(setting.only).items():
        for way in ("whole", f"slices of {SLICE}"):
            images = TOY_IMAGES if setting.pretend else case.images
            try:
                changes = None if way == "whole" else in_slices(2 if setting.pretend else SLICE)
                clock = train(setting, case, images=images, steps=3, changes=changes)
                largest = images if setting.pretend else largest_batch(setting, case, images, changes)
                table.row(name, images, way, clock.peak / 2**30, largest)
            except Exception as error:
                table.failed(f"{name}, {way}", error)
            release(setting)


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
