"""The momentum teacher: initialization, dropout, and the weight of its targets."""

from dataclasses import replace

from lightning.pytorch import Trainer
from torch import nn

from ...common.errors import UserError
from .settings import MomentumSettings, TextSettings


def teacher_text(text: TextSettings, momentum: MomentumSettings) -> TextSettings:
    """Return the settings of the teacher's BERT: the student's, without dropout unless `teacher_dropout` is set."""
    return text if momentum.teacher_dropout else replace(text, dropout=0.0)


def copy_student(student: nn.Module, teacher: nn.Module) -> None:
    """Initialize the teacher as a copy of the student without gradients; `EMACallback` updates it."""
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)


def ramped_alpha(trainer: Trainer, momentum: MomentumSettings) -> float:
    """Return the weight of the soft targets: a linear ramp from 0 over the first epochs, batch by batch.

    Raises:
        UserError: If the training loader, and with it the ramp, has no length.
    """
    ramp = momentum.alpha_warmup_epochs * trainer.num_training_batches
    if ramp == float("inf"):
        raise UserError(
            "Expected a training loader with a length, over which alpha rises in the first epoch, got one without: "
            "set trainer.limit_train_batches to a number of batches, or model.momentum.alpha_warmup_epochs to 0."
        )
    batch = trainer.fit_loop.epoch_loop.total_batch_idx
    return momentum.alpha * (min(1.0, batch / ramp) if ramp else 1.0)


def distilled_alphas(alpha: float, momentum: MomentumSettings) -> tuple[float, float]:
    """Return the weights of the soft targets in image-text contrast and in masked language modelling."""
    return alpha * momentum.distill_itc, alpha * momentum.distill_mlm
