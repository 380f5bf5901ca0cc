"""Distillation losses: from class posteriors (listing 2), and from embeddings of a self-supervised teacher (S-SMKE).

Shapes: B pairs of this process, n of all processes, C classes, embedding dimension E, K rows of the queue.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...callbacks import FeatureQueue
from ...callbacks.distributed.collectives import gather, rank
from ..core.precision import unit
from ..losses.contrast import PairFeatures, contrast_losses
from .losses import posterior_divergence, posterior_entropy
from .settings import KLSettings, TeacherSettings
from .teacher import log_entropy

PREFIX = "target."
"""Prefix of the names of a queue in the state dict of `SHReModule`."""


class Distilled(NamedTuple):
    """A distillation loss, what is logged of it, and what the queue gets."""

    loss: Tensor
    logs: dict[str, Tensor]
    keys: Tensor | None = None  # unit embeddings [n, E]
    key_ids: Tensor | None = None  # ids of their images [n]

    def keys_of(self, queue: FeatureQueue | None) -> dict[str, Any]:
        """Return what a training step returns for a queue; nothing without one."""
        if queue is None:
            return {}
        return {"keys": {"target": self.keys}, "key_ids": {"target": self.key_ids}, "keys_are_gathered": True}


class PosteriorTarget(nn.Module):
    """Divergences from the teacher's class posterior of an image, of the image's posterior and of the caption's.

    Args:
        kl: settings.
        classes: number of classes C.
    """

    queue: FeatureQueue | None = None

    def __init__(self, kl: KLSettings, classes: int) -> None:
        super().__init__()
        self.kl, self.classes = kl, classes
        self._logged_entropy = False

    def forward(self, target: Tensor, image: Tensor, text: Tensor, image_id: Tensor) -> Distilled:
        """Compute the loss of the teacher's and the student's logits [B, C]."""
        share, temperature = self.kl.image_share, self.kl.temperature
        of_image, of_text = (posterior_divergence(target, logits, temperature) for logits in (image, text))
        entropy = posterior_entropy(target, temperature)
        if not self._logged_entropy:
            self._logged_entropy = True
            log_entropy(float(entropy), self.classes)
        logs = {
            "train/kl_image": of_image.detach(),
            "train/kl_text": of_text.detach(),
            "train/teacher_entropy": entropy,
        }
        return Distilled(share * of_image + (1 - share) * of_text, logs)


class EmbeddingTarget(nn.Module):
    """Contrast of an image and of its caption with the teacher's embeddings (thesis, section Contrastive Distillation).

    The positive is the teacher's embedding of the image itself; negatives are those of the other images of the batch
    and of the queue, the thesis' memory bank. The teacher is frozen: embeddings of earlier batches are not outdated.

    Args:
        teacher: settings.
        width: embedding dimension E.
        mask_same_image: exclude other rows of an image from its negatives.
        rows: rows of the logits that are held at a time; None holds all.
    """

    def __init__(self, teacher: TeacherSettings, width: int, mask_same_image: bool, rows: int | None) -> None:
        super().__init__()
        self.scale = 1 / teacher.temperature
        self.mask_same_image, self.rows = mask_same_image, rows
        size = teacher.queue_size
        self.queue = FeatureQueue(size, width, ids=True, random_start=True) if size else None

    def forward(self, target: Tensor, image: Tensor, text: Tensor, image_id: Tensor) -> Distilled:
        """Compute the loss of the teacher's and the student's embeddings [B, E]."""
        keys, key_ids = gather(unit(target)), gather(image_id)
        columns, ids = keys, key_ids
        if self.queue is not None and self.queue.ids is not None:
            columns = torch.cat([keys, self.queue.features.to(keys.dtype)])
            ids = torch.cat([key_ids, self.queue.ids])
        pairs = PairFeatures(unit(image), unit(text), columns, columns, self.scale)
        known = (image_id[:, None], ids[:, None]) if self.mask_same_image else None
        loss = contrast_losses(pairs, [], rank() * len(image), self.rows, known).contrast
        return Distilled(loss, {"train/target_contrast": loss.detach()}, keys, key_ids)


def make_target(
    teacher: TeacherSettings, kl: KLSettings, outputs: int, mask_same_image: bool, rows: int | None
) -> PosteriorTarget | EmbeddingTarget:
    """Return the distillation loss of a kind of teacher with a number of outputs, C or E."""
    if teacher.target == "embedding":
        return EmbeddingTarget(teacher, outputs, mask_same_image, rows)
    return PosteriorTarget(kl, outputs)
