"""The texts that a run predicts."""

from __future__ import annotations

from functools import cached_property

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from ...common.errors import UserError
from ..sources.text_files import read_texts
from .captions import usable_caption


class PredictTexts:
    """Texts in a list, or in a text file with one text per line.

    Args:
        given: the list or the path; None for no texts.
        clean: whether to apply ALBEF's caption cleaning.
        max_words: number of words that the cleaning keeps.
    """

    def __init__(self, given: str | list[str] | None, clean: bool, max_words: int) -> None:
        self.given = given
        self.clean = clean
        self.max_words = max_words

    @cached_property
    def all(self) -> list[str]:
        """All texts; those without content are in no batch."""
        return read_texts(self.given) if isinstance(self.given, str) else list(self.given or ())

    def usable(self) -> dict[int, tuple[int, str]]:
        """Return the texts that are not empty, by index, each with its index."""
        return {pair[0]: pair for pair in enumerate(self.all) if usable_caption(pair[1], self.clean, self.max_words)}

    def check(self) -> None:
        """Check that some of the texts have content, and log how many have none.

        Raises:
            UserError: texts were given, and none has content.
        """
        if self.given is None:
            return
        total, usable = len(self.all), len(self.usable())
        if not usable:
            origin = f" in {self.given!r}" if isinstance(self.given, str) else ""
            raise UserError(
                f"Expected texts with content, got {total} without{origin}: give a text file with one text per line, "
                "or a list of texts, as data.predict_texts."
            )
        if usable < total:
            rank_zero_info(f"{total - usable} of the {total} texts to predict are empty and skipped.")
