"""The teachers of reinforced data: their stored embeddings, and the similarities that the student learns from."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...callbacks import gather
from ...common.errors import UserError
from ..losses.contrast import Side
from .pairs import TEACHER_TEXTS
from .settings import TeacherSettings

_DATACOMP_DIMS, _DATACOMP_SCALE = [768, 768], 100.0
TEACHER_IMAGE = "teacher_image"
"""The teachers' image embeddings in a batch."""


class Teachers(NamedTuple):
    """Embedding dimension and scale of each teacher; embeddings of all teachers are stored concatenated."""

    dims: Sequence[int]
    scales: Sequence[float]

    @classmethod
    def of(cls, given: TeacherSettings, stored: Mapping[str, Any] | None = None) -> "Teachers":
        """Return the teachers of the settings, else of the data, else of DataCompDR.

        Args:
            given: the settings.
            stored: `dims`, `scales` and `source` of the data's manifest, if it has one.

        Raises:
            UserError: If settings and manifest differ, or the numbers of dimensions and scales.
        """
        if stored is not None:
            for name, value in (("dims", given.dims), ("scales", given.scales)):
                if value is not None and not _close(value, stored[name]):
                    raise UserError(
                        f"Expected a teacher.{name} of {stored[name]}, with which the data was reinforced by "
                        f"{stored['source']}, got {value}: leave model.teacher.{name} out, or set it to null."
                    )
            return cls(stored["dims"], stored["scales"])
        dims = _DATACOMP_DIMS if given.dims is None else given.dims
        scales = [_DATACOMP_SCALE] * len(dims) if given.scales is None else given.scales
        if len(dims) != len(scales):
            raise UserError(
                f"Expected one dimension and one scale for each teacher, got {len(dims)} teacher.dims and "
                f"{len(scales)} teacher.scales: correct one of them."
            )
        return cls(dims, scales)

    @classmethod
    def of_data(cls, given: TeacherSettings, datamodule: Any) -> "Teachers":
        """Return the teachers of a run's data, after a check of the width of its embeddings.

        Args:
            given: the settings.
            datamodule: the datamodule of the run, which may know its `teachers` and its `teacher_width`; or None.

        Raises:
            UserError: If the data has other teachers.
        """
        teachers = cls.of(given, getattr(datamodule, "teachers", None))
        if (width := getattr(datamodule, "teacher_width", None)) is not None:
            teachers.check_width(width)
        return teachers

    @torch.no_grad()
    def sides(self, batch: Mapping[str, Tensor], kinds: Sequence[str]) -> dict[str, list[Side]]:
        """Return each teacher's embeddings of the pairs of each kind of caption, gathered in the data's precision.

        Raises:
            UserError: If the batch has no embeddings, or these are not as wide as all teachers together.
        """
        names = [TEACHER_IMAGE, *(TEACHER_TEXTS[kind] for kind in kinds)]
        missing = [name for name in names if name not in batch]
        if missing:
            raise UserError(
                f"Expected {', '.join(missing)} in the training batch, got only {', '.join(batch)}: train on "
                "reinforced data, name model.teacher.models, or set model.teacher.distillation_weight to 0."
            )
        self.check_width(batch[TEACHER_IMAGE].shape[1])
        own = [batch[name] for name in names]
        everyone = gather(torch.cat(own, 1)).chunk(len(own), 1)
        image, *texts = (tensor.split(list(self.dims), 1) for tensor in own)
        all_image, *all_texts = (tensor.split(list(self.dims), 1) for tensor in everyone)
        return {
            kind: [Side(*parts) for parts in zip(image, text, all_image, all_text, self.scales, strict=True)]
            for kind, text, all_text in zip(kinds, texts, all_texts, strict=True)
        }

    def check_width(self, found: int) -> None:
        """Check that stored embeddings are as wide as all teachers together.

        Raises:
            UserError: If not.
        """
        if found != sum(self.dims):
            raise UserError(
                f"Expected teacher embeddings of width {sum(self.dims)}, the sum of teacher.dims {list(self.dims)}, "
                f"got {found} in the data: set model.teacher.dims to the teachers that the data was reinforced with."
            )


def _close(given: Sequence[float], stored: Sequence[float]) -> bool:
    """Return whether typed numbers equal stored ones to one percent."""
    return len(given) == len(stored) and all(map(partial(math.isclose, rel_tol=0.01), given, stored))
