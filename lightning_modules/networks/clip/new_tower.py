"""A trained pair of towers of which one is replaced by a new one, which is trained into the pair's space."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from ....common.errors import UserError
from ....common.ranges import COUNT, SettingsGroup
from ...core.settings import settings
from .pair import ImageTower, TextTower, completed_text

TOWERS = {"image": "visual", "text": "text"}
"""Attribute of each tower of a pair."""


@dataclasses.dataclass(frozen=True)
class NewTower(SettingsGroup, option="model"):
    """A trained pair with another image or another text tower. The embedding dimension is the pair's.

    Args:
        image: the new image tower; None keeps that of the pair. See `ImageTower`.
        text: the new text tower; None keeps that of the pair. See `TextTower`.
        of: the pair, as a name or as the fields that describe it; checkpoints have it, and need no other file.
        image_size: side of the pair's images in pixels; None means its own.
        max_tokens: number of tokens of the pair's texts; None means its own.

    Raises:
        UserError: If there is no new tower or two, or it is unknown.
    """

    image: ImageTower | None = None
    text: TextTower | None = None
    of: str | dict[str, Any] | None = None
    image_size: Annotated[int | None, COUNT] = None
    max_tokens: Annotated[int | None, COUNT] = None

    def __post_init__(self) -> None:
        if (self.image is None) == (self.text is None):
            raise UserError(
                f"Expected one new tower, model.image or model.text, got {'none' if self.image is None else 'both'}: "
                "name the network of one of them."
            )
        if self.image is not None:  # perhaps a mapping in a checkpoint
            object.__setattr__(self, "image", settings(ImageTower, self.image))
        if self.text is not None:
            object.__setattr__(self, "text", settings(TextTower, self.text))

    @property
    def side(self) -> Literal["image", "text"]:
        """Which tower is new."""
        return "text" if self.image is None else "image"

    @property
    def tower(self) -> ImageTower | TextTower:
        """The new tower."""
        tower = self.text if self.image is None else self.image
        assert tower is not None
        return tower

    def __str__(self) -> str:
        return f"{self.tower} in the space of {self.of if isinstance(self.of, str) else 'a trained pair'}"

    def completed(self) -> NewTower:
        """Return the same with the configuration of a new text encoder, independent of files.

        Raises:
            UserError: If there is no such encoder.
        """
        return self if self.text is None else dataclasses.replace(self, text=completed_text(self.text))
