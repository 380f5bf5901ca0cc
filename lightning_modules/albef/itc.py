"""Image-text contrastive learning (ITC) with momentum distillation: equations 1, 2 and 6 of the paper.

Logits and softmax are in float32 or better.

Shapes: B pairs of this process, n keys of the batch (of this process or of all), E embedding dimension, M candidates:
the keys of the batch, then the slots of the queue. Each key has k ids: of its image, and perhaps of its text.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...callbacks import FeatureQueue
from ...callbacks.distributed.collectives import all_reduce_sum, gather, rank, world_size
from ..core.memory import in_slices
from ..evaluation.protocol import Batch
from ..losses.contrast import share_an_id, text_ids
from .losses import contrastive_targets, itc_loss
from .network import Encoded
from .settings import ContrastSettings


class Keys(NamedTuple):
    """The teacher's features of a batch, of this process or of all; they enter the queues."""

    image: Tensor  # [n, E]
    text: Tensor  # [n, E]
    ids: Tensor  # long [n] or [n, k]
    offset: int  # index of this process's first key
    gathered: bool  # whether the keys are of all processes

    def for_queues(self) -> dict[str, Any]:
        """Return the entries of a step's output that `QueueCallback` reads."""
        return {
            "keys": {"image": self.image, "text": self.text},
            "key_ids": {"image": self.ids, "text": self.ids},
            "keys_are_gathered": self.gathered,
        }


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
    """The loss of a batch, the logits from which hard negatives are drawn, and how often a match is ranked first."""

    loss: Tensor  # 0-D
    image_logits: Tensor  # [B, B], without gradient: images of this process to its text keys
    text_logits: Tensor  # [B, B], without gradient: texts of this process to its image keys
    hits: Tensor  # [3], share of rows with a match first among the keys of the batch: student's, teacher's, by chance


class Accuracies(nn.Module):
    """Running means of the accuracy of student and teacher among the keys of a batch: 0 at chance, 1 if always right.

    They start at 0 and lag by some 50 batches. The buffer is in the checkpoint and equal in all processes.

    Attributes:
        mean: [2], of the student and of the teacher.
    """

    mean: Tensor
    MOMENTUM = 0.98

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    @property
    def student(self) -> Tensor:
        """The student's accuracy above chance, 0-D."""
        return self.mean[0]

    @property
    def teacher(self) -> Tensor:
        """The teacher's accuracy above chance, 0-D."""
        return self.mean[1]

    @torch.no_grad()
    def update(self, contrast: Contrast) -> None:
        """Take in a batch of all processes."""
        hits = all_reduce_sum(contrast.hits) / world_size()
        chance = hits[2]
        possible = (1 - chance).clamp(min=torch.finfo(hits.dtype).eps)  # 0 if each key matches each row
        above_chance = ((hits[:2] - chance) / possible).clamp(min=0)
        self.mean.lerp_(above_chance.to(self.mean.dtype), 1 - self.MOMENTUM)


def teacher_keys(teacher: Encoded, batch: Batch, settings: ContrastSettings) -> Keys:
    """Return the teacher's features as keys: of all processes, or with `key_columns` "local" of this one.

    One collective gathers both modalities.
    """
    ids = key_ids(batch, settings)
    if settings.key_columns == "local":
        return Keys(teacher.image_features, teacher.text_features, ids, offset=0, gathered=False)
    image, text = gather(torch.cat([teacher.image_features, teacher.text_features], 1)).chunk(2, 1)
    return Keys(image, text, gather(ids), offset=rank() * len(ids), gathered=True)


def key_ids(batch: Batch, settings: ContrastSettings) -> Tensor:
    """Return the ids of a batch's keys: of images, long [B], or with `match_same_text` of images and texts, [B, 2]."""
    if not settings.match_same_text:
        return batch["image_id"]
    return torch.stack([batch["image_id"], text_ids(batch["input_ids"], batch["attention_mask"])], 1)


def image_text_contrast(
    student: Encoded,
    teacher: Encoded,
    keys: Keys,
    queues: dict[str, FeatureQueue],
    temperature: Tensor,
    alpha: float | Tensor,
    positives: Literal["image_id", "diagonal"],
    slice_rows: int | None,
) -> Contrast:
    """Contrast the student's features with the teacher's keys.

    Args:
        student: the student's features, with gradient.
        teacher: the teacher's features, without gradient.
        keys: result of `teacher_keys`.
        queues: queues by modality, "image" and "text".
        temperature: [1], learnable.
        alpha: weight of the teacher's soft targets.
        positives: which candidates match a row: those that share an id, or the key of the row's pair alone.
        slice_rows: rows whose logits are held at a time; None for all at once.
    """
    images = Candidates(keys.image, keys.ids, queues["image"])
    texts = Candidates(keys.text, keys.ids, queues["text"])
    pairs = len(student.image_features)
    local_keys = slice(keys.offset, keys.offset + pairs)
    device = keys.image.device

    def contrast_rows(
        ids: Tensor,
        key_index: Tensor,
        teacher_image: Tensor,
        teacher_text: Tensor,
        student_image: Tensor,
        student_text: Tensor,
    ) -> tuple[Tensor, ...]:
        def targets(queries: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor]:
            """Return the targets [R, M], which keys of the batch match [R, n], and where the teacher is right [R]."""
            candidate_ids = candidates.ids()
            if positives == "diagonal":
                matches = torch.arange(len(candidate_ids), device=device) == key_index[:, None]
            else:
                matches = share_an_id(ids, candidate_ids)
            matches = matches & candidates.valid()
            logits = candidates.logits(queries, temperature)
            of_batch = matches[:, : len(candidates.keys)].clone()
            return contrastive_targets(logits, matches, alpha), of_batch, _first_is_match(logits, of_batch)

        with torch.no_grad():  # before the student's logits, so that those of the teacher are no longer in memory
            image_targets, texts_match, image_teacher = targets(teacher_image, texts)
            text_targets, images_match, text_teacher = targets(teacher_text, images)
        image_logits = texts.logits(student_image, temperature)
        text_logits = images.logits(student_text, temperature)
        with torch.no_grad():
            hits = [
                _first_is_match(image_logits, texts_match) + _first_is_match(text_logits, images_match),
                image_teacher + text_teacher,
                texts_match.to(image_logits.dtype).mean(1) + images_match.to(text_logits.dtype).mean(1),
            ]
        loss = itc_loss(image_logits, text_logits, image_targets, text_targets) * len(ids)
        # Clones, because a view of some columns would keep the logits of every slice in memory.
        return (
            loss[None],
            image_logits.detach()[:, local_keys].clone(),
            text_logits.detach()[:, local_keys].clone(),
            torch.stack(hits, 1) / 2,
        )

    with torch.autocast(device.type, enabled=False):
        loss, image_logits, text_logits, hits = in_slices(
            contrast_rows,
            slice_rows,
            keys.ids[local_keys],
            torch.arange(local_keys.start, local_keys.stop, device=device),
            teacher.image_features,
            teacher.text_features,
            student.image_features,
            student.text_features,
        )
    return Contrast(loss.sum() / pairs, image_logits, text_logits, hits.mean(0))


def _first_is_match(logits: Tensor, matches: Tensor) -> Tensor:
    """Return 1 where the highest of the first n logits [R, M] is a match in boolean [R, n], else 0: [R]."""
    first = logits[:, : matches.shape[1]].argmax(1, keepdim=True)
    return matches.gather(1, first).squeeze(1).to(logits.dtype)
