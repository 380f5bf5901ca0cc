"""Checks of settings of SHRe and of the image probe."""

from collections.abc import Sequence

from ...common.errors import UserError
from .settings import (
    ContrastSettings,
    EvaluationSettings,
    KLSettings,
    MemorySettings,
    MixSettings,
    OptimSettings,
    ProbeOptimSettings,
    TeacherSettings,
)


def check_settings(
    teacher: TeacherSettings,
    kl: KLSettings,
    contrast: ContrastSettings,
    evaluation: EvaluationSettings,
    optim: OptimSettings,
    memory: MemorySettings,
    results: Sequence[str],
) -> None:
    """Check settings of `SHReModule`.

    Args:
        teacher: the teacher.
        kl: divergence.
        contrast: contrast.
        evaluation: retrieval.
        optim: optimizer.
        memory: slices.
        results: names of the shared encoder's results.

    Raises:
        UserError: If a setting is outside its range, or names a result that the shared encoder does not have.
    """
    _check("teacher.temperature", teacher.temperature, teacher.temperature > 0, "above 0")
    _check("teacher.queue_size", teacher.queue_size, teacher.queue_size >= 0, "of at least 0")
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
    _check("kl.weight", kl.weight, kl.weight >= 0, "of at least 0")
    _check("contrast.weight", contrast.weight, contrast.weight >= 0, "of at least 0")
    if not kl.weight and not contrast.weight:
        raise UserError("Expected a loss, got 0 for kl.weight and contrast.weight: raise one of them.")
    _check("kl.image_share", kl.image_share, 0 <= kl.image_share <= 1, "from 0 to 1")
    _check("kl.temperature", kl.temperature, kl.temperature > 0, "above 0")
    _check("contrast.temperature", contrast.temperature, contrast.temperature > 0, "above 0")
    _check("optim.warmup_share", optim.warmup_share, 0 <= optim.warmup_share < 1, "from 0 to below 1")
    for name, count in (("micro_batch_size", memory.micro_batch_size), ("loss_rows", memory.loss_rows)):
        _check(f"memory.{name}", count, count is None or count >= 1, "of at least 1")
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


def check_shares(mix: MixSettings, optim: ProbeOptimSettings) -> None:
    """Check settings of `ImageProbeModule`.

    Raises:
        UserError: If a setting is outside its range.
    """
    for group, names in (
        (mix, ("probability", "switch_probability", "label_smoothing")),
        (optim, ("warmup_share", "layer_decay")),
    ):
        for name in names:
            value = getattr(group, name)
            _check(name, value, 0 <= value <= 1, "from 0 to 1")
    _check("mixup", mix.mixup, mix.mixup >= 0, "of at least 0")
    _check("cutmix", mix.cutmix, mix.cutmix >= 0, "of at least 0")


def _check(name: str, value: float | None, valid: bool, what: str) -> None:
    if not valid:
        raise UserError(f"Expected a number {what}, got {name} {value}: correct it.")
