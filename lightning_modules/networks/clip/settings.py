"""Settings of all trainings of a pair of towers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....common.ranges import COUNT, SettingsGroup


@dataclass(frozen=True)
class MemorySettings(SettingsGroup, option="memory"):
    """Large batches on small memory.

    Args:
        micro_batch_size: pairs that go through the towers at a time, with activations computed again in the backward
            pass: the loss of the whole batch in the memory of a small one. Exact without BatchNorm. BatchNorm (MCi,
            MCt) normalizes each slice by its own statistics, and its running statistics move once a step, towards
            their mean over the slices. None means the whole batch.
        loss_rows: rows of the logits that are held at a time, computed again in the backward pass; None means all.
    """

    micro_batch_size: Annotated[int | None, COUNT] = None
    loss_rows: Annotated[int | None, COUNT] = None
