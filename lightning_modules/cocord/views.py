"""The views of an image that a training batch holds, and which encoder sees which of them.

`image` is x_s, `image_slow` is x'_s and `image_teacher` is x_t (section 3).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...common.errors import UserError
from .settings import ContrastSettings, Encoder, KDSettings, PredictionSettings

OTHER_VIEW = {"image": "image_slow", "image_slow": "image"}
"""The view whose cognate key is the target of a view's prediction."""


def batch_views(contrast: ContrastSettings, prediction: PredictionSettings) -> list[str]:
    """Return the views in a training batch."""
    views = ["image"]
    if prediction.weight:
        views.append("image_slow")
    if contrast.weight:
        views.append("image_teacher")
    return views


def student_views(prediction: PredictionSettings) -> list[str]:
    """Return the views that the student encodes."""
    return ["image", "image_slow"] if prediction.weight and prediction.symmetric else ["image"]


def teacher_views(contrast: ContrastSettings, prediction: PredictionSettings, kd: KDSettings) -> list[str]:
    """Return the views that the teacher encodes; none if no loss needs the teacher."""
    views = ["image"] if kd.weight or kd.features else []
    if contrast.weight and contrast.encoder == "teacher":
        views.append("image_teacher")
    if prediction.weight and prediction.encoder == "teacher":
        cognates = [OTHER_VIEW[view] for view in student_views(prediction)]
        views += [view for view in cognates if view not in views]
    return views


def key_encoders(contrast: ContrastSettings, prediction: PredictionSettings) -> set[Encoder]:
    """Return the encoders of keys: of the dictionary's, and of the cognate keys."""
    return {loss.encoder for loss in (contrast, prediction) if loss.weight}


def check_views(batch: Mapping[str, Tensor], views: Sequence[str]) -> None:
    """Check that a training batch holds all views and labels.

    Raises:
        UserError: If an entry is missing.
    """
    missing = [view for view in (*views, "label") if view not in batch]
    if missing:
        raise UserError(
            f"Expected {', '.join((*views, 'label'))} in the training batch, got no {', '.join(missing)}: set "
            f"data.views to {list(views)}, or leave it out."
        )
