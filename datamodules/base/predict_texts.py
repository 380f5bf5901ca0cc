"""Texts for prediction."""

from __future__ import annotations

from functools import cached_property

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from ...common.errors import UserError
from ..text.captions import usable_caption
from .text_files import read_texts


class PredictTexts:
    """Texts for prediction, from a list or a text file with one text per line.

    Args:
        given: the list, or the path of the file; None for no texts.
        clean: whether to apply ALBEF's caption cleaning.
        max_words: number of words that the cleaning keeps.
    """

    def __init__(self, given: str | list[str] | None, clean: bool, max_words: int) -> None:
        self.given = given
        self.clean = clean
        self.max_words = max_words

    @cached_property
    def all(self) -> list[str]:
        """All texts; empty texts are in no batch."""
        return read_texts(self.given) if isinstance(self.given, str) else list(self.given or ())

    def usable(self) -> dict[int, tuple[int, str]]:
        """Return the texts that are not empty, as pairs of index and text by index."""
        return {pair[0]: pair for pair in enumerate(self.all) if usable_caption(pair[1], self.clean, self.max_words)}

    def check(self) -> None:
        """Check that at least one text is not empty, and log the number of empty texts.

        Raises:
            UserError: If texts were given, and all of them are empty.
        """
        if self.given is None:
            return
        total, usable = len(self.all), len(self.usable())
        if not usable:
            origin = f" in {self.given!r}" if isinstance(self.given, str) else ""
            raise UserError(
                f"Expected at least one text that is not empty, got {total} empty texts{origin}: set "
                "data.predict_texts to a text file with one text per line, or to a list of texts."
            )
        if usable < total:
            rank_zero_info(f"{total - usable} of the {total} texts to predict are empty and skipped.")
