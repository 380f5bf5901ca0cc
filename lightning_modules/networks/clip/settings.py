"""Settings of all trainings of a pair of towers."""

from dataclasses import dataclass

from ....common.errors import UserError


@dataclass(frozen=True)
class MemorySettings:
    """Large batches on small memory.

    Args:
        micro_batch_size: pairs that go through the towers at a time, with activations computed again in the backward
            pass: the loss of the whole batch in the memory of a small one. Exact without BatchNorm. BatchNorm (MCi,
            MCt) normalizes each slice by its own statistics, and its running statistics move once a step, towards
            their mean over the slices. None means the whole batch.
        loss_rows: rows of the logits that are held at a time, computed again in the backward pass; None means all.
    """

    micro_batch_size: int | None = None
    loss_rows: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("micro_batch_size", self.micro_batch_size), ("loss_rows", self.loss_rows)):
            if value is not None and value < 1:
                raise UserError(f"Expected a memory.{name} of at least 1, got {value}: correct it, or leave it out.")
