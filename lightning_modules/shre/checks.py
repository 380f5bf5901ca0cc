"""Checks of settings of SHRe and of the image probe."""

from collections.abc import Sequence

from ...common.errors import UserError
from .settings import ContrastSettings, EvaluationSettings, KLSettings, TeacherSettings


def check_settings(
    teacher: TeacherSettings,
    kl: KLSettings,
    contrast: ContrastSettings,
    evaluation: EvaluationSettings,
    results: Sequence[str],
) -> None:
    """Check settings of `SHReModule`.

    Args:
        teacher: the teacher.
        kl: divergence.
        contrast: contrast.
        evaluation: retrieval.
        results: names of the shared encoder's results.

    Raises:
        UserError: If settings do not fit together, or name a result that the shared encoder does not have.
    """
    if teacher.queue_size and teacher.target != "embedding":
        raise UserError(
            f"Expected teacher.target embedding with a queue, got {teacher.target} with teacher.queue_size "
            f"{teacher.queue_size}: set one of them."
        )
    if teacher.target == "embedding" and kl.image_share != 0.5:
        raise UserError(
            f"Expected kl.image_share 0.5 with embeddings, whose contrast weights both alike, got {kl.image_share}: "
            "correct it."
        )
    if not kl.weight and not contrast.weight:
        raise UserError("Expected a loss, got 0 for kl.weight and contrast.weight: raise one of them.")
    layers = contrast.layers
    if layers is not None and (not layers or not set(layers) <= set(results) or len(set(layers)) < len(layers)):
        raise UserError(
            f"Expected some of the shared encoder's results {', '.join(results)} in contrast.layers, got {layers}: "
            "correct it."
        )
    if evaluation.features not in (results[0], results[-1]):
        raise UserError(
            f"Expected {results[0]!r} or {results[-1]!r} as evaluation.features, got {evaluation.features!r}: correct "
            "it."
        )
