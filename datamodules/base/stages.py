"""Splits of a datamodule, and the splits that each stage reads."""

from __future__ import annotations

from typing import Literal

Split = Literal["train", "validation", "test", "predict"]
_SPLITS: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "validation", "test", "predict"),
}


def splits_of(stage: str | None) -> tuple[Split, ...]:
    """Return the splits that a stage reads; all splits for None."""
    return _SPLITS[stage]
