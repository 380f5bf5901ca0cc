"""SHRe's losses: of listing 2, and contrast with the embeddings of a self-supervised teacher (S-SMKE).

Shapes: B pairs of this process, n of all processes, C classes, embedding dimension E, K rows of the queue.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ...callbacks import FeatureQueue
from ...callbacks.distributed.collectives import gather, rank
from ..core.precision import at_least_float32, unit
from ..losses.contrast import PairFeatures, contrast_losses
from ..losses.soft_targets import posterior_divergence
from .settings import KLSettings, TeacherSettings


def posterior_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the mean entropy, in nats, of the class posteriors of logits [B, C]; at most log C."""
    log_posterior = F.log_softmax(at_least_float32(logits) / temperature, -1)
    return -(log_posterior.exp() * log_posterior).sum(-1).mean()


def contrasts_by_result(
    images: Mapping[str, Tensor],
    texts: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    ids: tuple[Tensor, Tensor] | None = None,
    rows: int | None = None,
) -> dict[str, Tensor]:
    """Compute CLIP's loss of each contrasted result, over the pairs of all processes.

    Args:
        images: results of the images [B, ...] by name.
        texts: results of the captions [B, ...] by name.
        scales: logarithm of the inverse temperature [1] of each contrasted result.
        ids: ids of `pair_ids`; pairs that share one are not negatives of each other.
        rows: rows of the logits that are held at a time; None holds all.
    """
    rows_of_process = [unit(side[name]) for side in (images, texts) for name in scales]
    widths = [features.shape[1] for features in rows_of_process]
    columns = gather(torch.cat(rows_of_process, 1), gradient=True).split(widths, 1)
    losses = {}
    for image, name in enumerate(scales):
        text = image + len(scales)
        pairs = PairFeatures(
            rows_of_process[image], rows_of_process[text], columns[image], columns[text], scales[name].exp()
        )
        losses[name] = contrast_losses(pairs, [], rank() * len(pairs.image), rows, ids).contrast
    return losses


class Distilled(NamedTuple):
    """A distillation loss, the values to log, and the keys for the queue."""

    loss: Tensor
    logs: dict[str, Tensor]
    keys: Tensor | None = None  # unit embeddings of the teacher [n, E]
    key_ids: Tensor | None = None  # ids of their images [n]

    def keys_of(self, queue: FeatureQueue | None) -> dict[str, Any]:
        """Return the entries of a training step's output that `QueueCallback` reads; none without a queue."""
        if queue is None:
            return {}
        return {"keys": {"target": self.keys}, "key_ids": {"target": self.key_ids}, "keys_are_gathered": True}


class PosteriorDistillation(nn.Module):
    """Divergences of the image's and of the caption's class posterior from the teacher's posterior of the image.

    Args:
        kl: settings.
        classes: number of classes C.
    """

    queue: FeatureQueue | None = None

    def __init__(self, kl: KLSettings, classes: int) -> None:
        super().__init__()
        self.kl = kl
        self.classes = classes
        self._logged_entropy = False

    def forward(self, teacher: Tensor, image: Tensor, text: Tensor, image_id: Tensor) -> Distilled:
        """Compute the loss of the teacher's and the student's logits [B, C]."""
        image_share = self.kl.image_share
        image_divergence = posterior_divergence(teacher, image, self.kl.temperature)
        text_divergence = posterior_divergence(teacher, text, self.kl.temperature)
        entropy = posterior_entropy(teacher, self.kl.temperature)
        if not self._logged_entropy:
            self._logged_entropy = True
            rank_zero_info(
                f"The teacher's posteriors of the first batch have a mean entropy of {float(entropy):.2f} nats. Near "
                f"{math.log(self.classes):.2f} they carry no information; a kl.temperature below 1 sharpens them."
            )
        logs = {
            "train/kl_image": image_divergence.detach(),
            "train/kl_text": text_divergence.detach(),
            "train/teacher_entropy": entropy,
        }
        return Distilled(image_share * image_divergence + (1 - image_share) * text_divergence, logs)


class EmbeddingDistillation(nn.Module):
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
        self.mask_same_image = mask_same_image
        self.rows = rows
        size = teacher.queue_size
        self.queue = FeatureQueue(size, width, ids=True, random_start=True) if size else None

    def forward(self, teacher: Tensor, image: Tensor, text: Tensor, image_id: Tensor) -> Distilled:
        """Compute the loss of the teacher's and the student's embeddings [B, E]."""
        keys = gather(unit(teacher))
        key_ids = gather(image_id)
        columns = keys
        column_ids = key_ids
        if self.queue is not None and self.queue.ids is not None:
            columns = torch.cat([keys, self.queue.features.to(keys.dtype)])
            column_ids = torch.cat([key_ids, self.queue.ids])
        pairs = PairFeatures(unit(image), unit(text), columns, columns, self.scale)
        ids = (image_id[:, None], column_ids[:, None]) if self.mask_same_image else None
        loss = contrast_losses(pairs, [], rank() * len(image), self.rows, ids).contrast
        return Distilled(loss, {"train/target_contrast": loss.detach()}, keys, key_ids)
