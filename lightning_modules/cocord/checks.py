"""Checks of CoCoRD's settings and batches."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...common.errors import UserError
from .settings import TeacherSettings


def check_losses(weights: Mapping[str, float], taught: bool, teacher: TeacherSettings) -> None:
    """Check the weights of the losses.

    Args:
        weights: weight of each loss by its name.
        taught: whether a loss needs the teacher.
        teacher: the teacher.

    Raises:
        UserError: If a weight is negative, all are 0, or a loss lacks its teacher.
    """
    options = {name: "class_weight" if name == "class" else f"{name}.weight" for name in weights}
    for name, weight in weights.items():
        if weight < 0:
            raise UserError(f"Expected a weight of at least 0, got {options[name]} {weight}: correct it.")
    if not any(weights.values()):
        raise UserError(f"Expected a loss, got 0 for {', '.join(options.values())}: raise class_weight.")
    if taught and teacher.name is None:
        raise UserError("Expected a teacher for the losses that learn from one, got none: set model.teacher.name.")


def check_views(batch: Mapping[str, Tensor], views: Sequence[str]) -> None:
    """Check that a training batch holds all views and labels.

    Raises:
        UserError: If an entry is missing.
    """
    missing = [view for view in (*views, "label") if view not in batch]
    if missing:
        raise UserError(
            f"Expected {', '.join((*views, 'label'))} in the training batch, got no {', '.join(missing)}: set data.views "
            f"to {list(views)}, or leave it out."
        )
