"""CRD: Contrastive Representation Distillation (Tian et al., arXiv 1910.10699), with its authors' memory banks.

Shapes: B images of this process, N training images, K negatives, E values of an embedding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...callbacks import gather
from ...callbacks.distributed.collectives import all_reduce_sum, broadcast, world_size
from ...callbacks.draws import draw_bits
from ...common.errors import UserError
from ..core.precision import at_least_float32, unit

_EPSILON = 1e-7  # of the authors' code


class CRD(nn.Module):
    """Contrast embeddings of student and teacher with banks of both networks' embeddings of all training images.

    A bank holds a moving average of unit length of each image's embedding. The student's embedding is compared with the
    teacher's bank and the other way round: the positive is the entry of the same image, from earlier epochs; negatives
    are entries of images of other classes. Banks are part of the checkpoint.

    Scores of a batch with all entries are B x N values, which take less memory than the K entries of each image, except
    for N > E * K.

    Args:
        student_dim: width of the student's features.
        teacher_dim: width of the teacher's features.
        negatives: number K of negatives.
        temperature: temperature of the scores (authors' code).
        embed_dim: embedding dimension E (authors' code).
        momentum: momentum of the banks (authors' code).
    """

    student_bank: Tensor
    teacher_bank: Tensor
    scales: Tensor
    labels: Tensor

    def __init__(
        self,
        student_dim: int,
        teacher_dim: int,
        negatives: int = 16384,
        temperature: float = 0.07,
        embed_dim: int = 128,
        momentum: float = 0.5,
    ) -> None:
        super().__init__()
        self.student_embedding = nn.Linear(student_dim, embed_dim)
        self.teacher_embedding = nn.Linear(teacher_dim, embed_dim)
        self.negatives = negatives
        self.temperature = temperature
        self.momentum = momentum
        self.register_buffer("student_bank", torch.empty(0, embed_dim))
        self.register_buffer("teacher_bank", torch.empty(0, embed_dim))
        self.register_buffer("scales", torch.full((2,), -1.0))  # normalizers Z of both directions; negative: unknown
        self.register_buffer("labels", torch.empty(0, dtype=torch.long), persistent=False)
        self.replacement = False
        self._last_batch: tuple[Tensor, Tensor, Tensor] | None = None  # indices, embeddings of student and teacher

    def start(self, labels: Sequence[int]) -> None:
        """Make equal banks in every process, with uniform values (authors' code), unless there are some.

        Args:
            labels: label of each training image by `sample_index`; negative for images that are never read.

        Raises:
            UserError: If all images are of one class, or banks of a checkpoint have another number of images.
        """
        label = torch.tensor(labels, dtype=torch.long)
        counts = label[label >= 0].bincount()
        others = int(counts.sum() - counts.max()) if len(counts) else 0
        if not others:
            raise UserError("Expected training images of at least two classes for kd.crd_weight, got one: set it to 0.")
        # The authors draw with replacement for the classes with too few others: here for all classes if for one.
        self.replacement = self.negatives > others
        self.labels = label.to(self.labels.device)
        self._check(len(self.student_bank))
        if not len(self.student_bank):
            for name in ("student_bank", "teacher_bank"):
                self._resize(name, len(label))
                bound = (3 / getattr(self, name).shape[1]) ** 0.5
                getattr(self, name).uniform_(-bound, bound)
                broadcast(getattr(self, name))

    def forward(self, student: Tensor, teacher: Tensor, index: Tensor, label: Tensor) -> Tensor:
        """Compute the sum of both directions' losses; `update` then writes the embeddings into the banks.

        Args:
            student: the student's features of the batch [B, D].
            teacher: the teacher's features of the batch [B, F], without gradient.
            index: positions of the images among the training images, long [B].
            label: labels of the images, long [B].
        """
        with torch.autocast(student.device.type, enabled=False):
            negatives = draw_negatives(self.labels, label, self.negatives, self.replacement)
            entries = torch.cat([index[:, None], negatives], 1)
            student = unit(self.student_embedding(student.to(self.student_embedding.weight.dtype)))
            teacher = unit(self.teacher_embedding(teacher.to(self.teacher_embedding.weight.dtype)))
            scores = [
                self._scores(student, self.teacher_bank, entries),
                self._scores(teacher, self.student_bank, entries),
            ]
            means = all_reduce_sum(torch.stack([score.detach().mean() for score in scores])) / world_size()
            scales = torch.where(self.scales < 0, means * len(self.labels), self.scales)
            self.scales.copy_(torch.where(scales.isfinite(), scales, self.scales))
            self._last_batch = gather(index), gather(student), gather(teacher)
            losses = [nce_loss(score / scale, len(self.labels)) for score, scale in zip(scores, scales, strict=True)]
            return torch.stack(losses).sum()

    @torch.no_grad()
    def update(self) -> None:
        """Write the embeddings of the last batch into the banks: after the backward pass, which reads them."""
        if self._last_batch is None:
            return
        index, *embeddings = self._last_batch
        self._last_batch = None
        for bank, embedding in zip((self.student_bank, self.teacher_bank), embeddings, strict=True):
            before = at_least_float32(bank[index])
            after = unit(self.momentum * before + (1 - self.momentum) * embedding)
            finite = after.isfinite().all(1, keepdim=True)  # others would spoil the loss until they are read again
            bank.index_copy_(0, index, torch.where(finite, after, before).to(bank.dtype))

    def _scores(self, embedding: Tensor, bank: Tensor, entries: Tensor) -> Tensor:
        """Return exp(cosine / temperature) with the entries [B, K + 1] of a bank."""
        return ((embedding @ bank.to(embedding.dtype).T).gather(1, entries) / self.temperature).exp()

    def _check(self, images: int) -> None:
        """Compare the size of banks that exist with the number of training images, if that is known."""
        if images and len(self.labels) not in (0, images):
            raise UserError(
                f"Expected banks of {len(self.labels)} training images in the checkpoint, got {images}: train with the "
                "data of the checkpoint."
            )

    def _resize(self, name: str, images: int) -> None:
        bank = getattr(self, name)
        setattr(self, name, bank.new_empty(images, bank.shape[1]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("student_bank", "teacher_bank"):
            saved = state_dict.get(prefix + name)
            if saved is None or len(saved) == len(getattr(self, name)):
                continue
            self._check(len(saved))
            self._resize(name, len(saved))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def draw_negatives(labels: Tensor, label: Tensor, count: int, replacement: bool) -> Tensor:
    """Draw training images of other classes than each image of a batch, uniformly: long [B, count].

    Draws are by (seed, step, position in the global batch).

    Args:
        labels: labels of the training images, long [N]; negative for images that are not drawn.
        label: labels of the batch, long [B].
        count: number of draws for each image.
        replacement: whether an image may be drawn twice.
    """
    others = (labels != label[:, None]) & (labels >= 0)
    if replacement:
        counts = others.cumsum(1)
        number = draw_bits(len(others), count, others.device) % counts[:, -1:]
        return torch.searchsorted(counts, number + 1)
    # The largest of equally distributed keys.
    keys = draw_bits(*others.shape, others.device).masked_fill_(~others, -1)
    return keys.topk(count, sorted=False).indices


def nce_loss(probability: Tensor, images: int) -> Tensor:
    """Compute noise-contrastive estimation of the positive, the first column (eq. 18 in CRD's paper).

    Args:
        probability: unnormalized probabilities of the positive and of K uniform draws [B, K + 1].
        images: number N of training images; noise has probability 1 / N.

    Returns:
        Sum over the columns, mean over the batch.
    """
    noise = (probability.shape[1] - 1) / images
    positive = probability[:, 0]
    negatives = probability[:, 1:]
    accepted = (positive / (positive + noise + _EPSILON)).log()
    rejected = (noise / (negatives + noise + _EPSILON)).log().sum(1)
    return -(accepted + rejected).mean()
