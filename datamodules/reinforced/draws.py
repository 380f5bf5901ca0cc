"""Choice of the stored augmentation and captions that a reinforced sample trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.sampling import view_seed

_RATIO_DRAW = 1
"""Number of the draw between real and synthetic caption, among those of `view_seed`."""


@dataclass(frozen=True)
class ReinforcedDraws:
    """Rules by which one augmentation and one synthetic caption are chosen; the defaults are the paper's.

    Args:
        first_augmentations: only the first this many augmentations are used; None means all.
        first_synthetic: only the first this many synthetic captions of each kind are used; None means all.
        sequential: whether epoch e uses augmentation and caption number e, modulo their counts, not random ones.
        synthetic_ratio: probability that a sample has its synthetic caption instead of the real one; None means that it
            has both.
    """

    first_augmentations: int | None = None
    first_synthetic: int | None = None
    sequential: bool = False
    synthetic_ratio: float | None = None

    def augmentation(self, count: int, numbers: tuple[int, int], epoch: int) -> int:
        """Return the index of one of `count` augmentations.

        Args:
            count: number of stored augmentations.
            numbers: random numbers of the sample, from `sample_numbers`.
            epoch: the epoch.
        """
        count = min(count, self.first_augmentations or count)
        return (epoch if self.sequential else numbers[0] >> 32) % count

    def synthetic(self, counts: Sequence[int], numbers: tuple[int, int], epoch: int) -> tuple[int, int]:
        """Return the kind and the index of one synthetic caption.

        Args:
            counts: number of captions of each kind.
            numbers: as in `augmentation`.
            epoch: as in `augmentation`.
        """
        used = [min(count, self.first_synthetic or count) for count in counts]
        if self.sequential:
            every = [(kind, place) for kind, count in enumerate(used) for place in range(count)]
            return every[epoch % len(every)]
        kind = (numbers[0] & 0xFFFFFFFF) % len(used)
        return kind, numbers[1] % used[kind]

    def captions(self, numbers: tuple[int, int]) -> tuple[bool, bool]:
        """Return whether a sample has its real caption, and whether it has a synthetic one."""
        if self.synthetic_ratio is None:
            return True, True
        synthetic = view_seed(numbers[0], _RATIO_DRAW) / 2**64 < self.synthetic_ratio
        return not synthetic, synthetic
