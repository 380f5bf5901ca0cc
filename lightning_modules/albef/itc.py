"""Image-text contrastive learning (ITC) with momentum distillation: equations 1, 2 and 6 of the paper.

Logits and softmax are in float32 or better.

Shapes: B pairs of this process, n keys of the batch (of this process or of all), E embedding dimension, M candidates:
the keys of the batch, then the slots of the queue. Each key has k ids: of its image, and perhaps of its text.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...callbacks import FeatureQueue
from ...callbacks.distributed.collectives import gather, rank
from ..core.memory import in_slices
from ..evaluation.protocol import Batch
from ..losses.contrast import share_an_id, text_ids
from ..losses.soft_targets import soft_cross_entropy
from .encoding import Encoded
from .settings import ContrastSettings


class Keys(NamedTuple):
    """The teacher's features of a batch, of this process or of all; they enter the queues."""

    image: Tensor  # [n, E]
    text: Tensor  # [n, E]
    ids: Tensor  # long [n] or [n, k]
    first: int  # index of this process's first key

    def for_queues(self, gathered: bool) -> dict[str, Any]:
        """Return what `QueueCallback` reads of a step's output; `gathered` says whether the keys are of all."""
        ids = {"image": self.ids, "text": self.ids}
        return {"keys": {"image": self.image, "text": self.text}, "key_ids": ids, "keys_are_gathered": gathered}


class Candidates(NamedTuple):
    """Keys that the features of the other modality are contrasted with: of the batch and of a queue."""

    keys: Tensor  # [n, E]
    key_ids: Tensor  # long [n] or [n, k]
    queue: FeatureQueue

    def valid(self) -> Tensor:
        """Boolean [M], false for empty slots of the queue."""
        return torch.cat([self.queue.valid.new_ones(len(self.keys)), self.queue.valid])

    def ids(self) -> Tensor:
        """Long [M] or [M, k], arbitrary for empty slots of the queue."""
        assert self.queue.ids is not None
        return torch.cat([self.key_ids, self.queue.ids])

    def logits(self, queries: Tensor, temperature: Tensor) -> Tensor:
        """Similarities [R, M] of queries [R, E] over the temperature (the exponents of eq. 1)."""
        similarity = torch.cat([queries @ self.keys.T, queries @ self.queue.features.T], 1) / temperature
        # The lowest finite number, not -inf, whose product with a zero target would be NaN.
        return similarity.masked_fill(~self.valid(), torch.finfo(similarity.dtype).min)


class Contrast(NamedTuple):
    """The loss of a batch, and the logits from which hard negatives are drawn."""

    loss: Tensor  # 0-D
    image_logits: Tensor  # [B, B], without gradient: images of this process to its text keys
    text_logits: Tensor  # [B, B], without gradient: texts of this process to its image keys


def key_ids(batch: Batch, settings: ContrastSettings) -> Tensor:
    """Return the ids of a batch's keys: of images, long [B], or with `match_same_text` of images and texts, [B, 2]."""
    if not settings.match_same_text:
        return batch["image_id"]
    return torch.stack([batch["image_id"], text_ids(batch["input_ids"], batch["attention_mask"])], 1)


def gather_keys(teacher: Encoded, ids: Tensor, columns: Literal["global", "local"]) -> Keys:
    """Return the teacher's features of all processes, or of this one; one collective for both modalities."""
    if columns == "local":
        return Keys(teacher.image_features, teacher.text_features, ids, first=0)
    image, text = gather(torch.cat([teacher.image_features, teacher.text_features], 1)).chunk(2, 1)
    return Keys(image, text, gather(ids), first=rank() * len(ids))


def image_text_contrast(
    student: Encoded,
    teacher: Encoded,
    keys: Keys,
    queues: dict[str, FeatureQueue],
    temperature: Tensor,
    alpha: float,
    positives: Literal["image_id", "diagonal"],
    slice_rows: int | None,
) -> Contrast:
    """Contrast the student's features with the teacher's keys.

    Args:
        student: the student's features, with gradient.
        teacher: the teacher's features, without gradient.
        keys: result of `gather_keys`.
        queues: queues by modality, "image" and "text".
        temperature: [1], learnable.
        alpha: weight of the teacher's soft targets.
        positives: which candidates match a row: those that share an id, or the row's own key alone.
        slice_rows: rows whose logits are held at a time; None for all at once.
    """
    images = Candidates(keys.image, keys.ids, queues["image"])
    texts = Candidates(keys.text, keys.ids, queues["text"])
    pairs = len(student.image_features)
    own = slice(keys.first, keys.first + pairs)

    def contrast_rows(
        ids: Tensor,
        own_key: Tensor,
        teacher_image: Tensor,
        teacher_text: Tensor,
        student_image: Tensor,
        student_text: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        def targets(queries: Tensor, candidates: Candidates) -> Tensor:
            matches = matching(positives, ids, own_key, candidates.ids()) & candidates.valid()
            return contrastive_targets(candidates.logits(queries, temperature), matches, alpha)

        with torch.no_grad():
            image_targets, text_targets = targets(teacher_image, texts), targets(teacher_text, images)
        image_logits = texts.logits(student_image, temperature)
        text_logits = images.logits(student_text, temperature)
        loss = itc_loss(image_logits, text_logits, image_targets, text_targets) * len(ids)
        # Clones, because a view of some columns would keep the logits of every slice in memory.
        return loss[None], image_logits.detach()[:, own].clone(), text_logits.detach()[:, own].clone()

    device = keys.image.device
    with torch.autocast(device.type, enabled=False):
        loss, image_logits, text_logits = in_slices(
            contrast_rows,
            slice_rows,
            keys.ids[own],
            torch.arange(own.start, own.stop, device=device),
            teacher.image_features,
            teacher.text_features,
            student.image_features,
            student.text_features,
        )
    return Contrast(loss.sum() / pairs, image_logits, text_logits)


def matching(positives: Literal["image_id", "diagonal"], ids: Tensor, own_key: Tensor, candidate_ids: Tensor) -> Tensor:
    """Return which candidates match which row, boolean [R, M].

    Args:
        positives: "image_id" matches all candidates that share an id with the row, "diagonal" the row's own key.
        ids: long [R] or [R, k].
        own_key: long [R], index of the row's own key among the candidates.
        candidate_ids: long [M] or [M, k].
    """
    if positives == "diagonal":
        return torch.arange(len(candidate_ids), device=candidate_ids.device) == own_key[:, None]
    return share_an_id(ids, candidate_ids)


def contrastive_targets(teacher_logits: Tensor, positives: Tensor, alpha: float) -> Tensor:
    """Mix the teacher's soft targets with the ground truth (eq. 6: y becomes (1 - alpha) y + alpha q).

    Args:
        teacher_logits: [R, M], the teacher's similarities over the temperature.
        positives: boolean [R, M], true where the candidate is a match; matches share a row's mass equally.
        alpha: weight of the soft targets.

    Returns:
        [R, M], each row summing to 1.
    """
    truth = positives.to(teacher_logits.dtype)
    return alpha * teacher_logits.softmax(-1) + (1 - alpha) * truth / truth.sum(-1, keepdim=True)


def itc_loss(image_logits: Tensor, text_logits: Tensor, image_targets: Tensor, text_targets: Tensor) -> Tensor:
    """Compute the image-text contrastive loss (eqs. 2 and 6): the mean cross-entropy of both directions.

    Args:
        image_logits: [R, M] from image to text.
        text_logits: [R, M] from text to image.
        image_targets: [R, M] from `contrastive_targets`.
        text_targets: [R, M] from `contrastive_targets`.
    """
    image_loss = soft_cross_entropy(image_logits.log_softmax(-1), image_targets).mean()
    text_loss = soft_cross_entropy(text_logits.log_softmax(-1), text_targets).mean()
    return (image_loss + text_loss) / 2
