"""Text assignment: which of two images a text describes, or none; pre-training for NLVR2 (section 5 of the paper).

Negatives are drawn by (seed, step, position in the global batch) among the images of a process, without waiting for the
device.

Shapes: B pairs of an image and a text, E embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....callbacks.draws import draw_uniform, global_positions
from ....common.ranges import COUNT
from ...core.memory import in_slices
from ...evaluation.protocol import Batch
from ...optim.configure import LRSchedulerCallable, OptimizerCallable
from ..itm import forbidden_pairs
from ..losses import mean_count
from ..settings import AssignmentOptimSettings, MemorySettings, TextSettings, VisionSettings
from .network import AssignmentNetwork
from .task import TaskMethod
from .weights import double_fusion

TEMPERATURE = 0.07
"""Divisor of the similarities that negatives are drawn by; the authors', whatever the learned temperature is."""


class Assignment(NamedTuple):
    """Two images for each text."""

    left: Tensor  # long [B], row of the first image
    right: Tensor  # long [B], row of the second image
    label: Tensor  # long [B]: 0, the text describes the first image; 1, the second; 2, none
    exists: Tensor  # boolean [B], whether the row has a negative


def draw_assignment(features: Tensor, forbidden: Tensor) -> Assignment:
    """Draw two images of each text: with probability 2/3 its image and a negative, in either order, else two negatives.

    Negatives are drawn with probability softmax(similarity / 0.07), the second without the first. A text with one
    admissible negative always gets its image too; a text without any is left out of the loss.

    Args:
        features: unit-length features [B, E] of the images.
        forbidden: boolean [B, B], true where the image cannot be a negative; it must be true on the diagonal.
    """
    similarity = (features @ features.T / TEMPERATURE).masked_fill(forbidden, -torch.inf)
    # The order of a race with these rates is that of draws without replacement; in logarithms no rate underflows.
    size = len(similarity)
    device = similarity.device
    race = similarity - (-draw_uniform(size, global_positions(size, device), device).log()).log()
    negatives = race.nan_to_num(nan=0.0).topk(min(2, len(race)), dim=1).indices
    first_negative = negatives[:, 0]
    second_negative = negatives[:, -1]
    candidates = (~forbidden).sum(1)
    matching_image = torch.arange(size, device=device)
    draws = draw_uniform(size, 2, device)
    with_match = (draws[:, 0] > 1 / 3) | (candidates < 2)
    match_is_left = draws[:, 1] > 0.5
    label = torch.where(with_match, torch.where(match_is_left, 0, 1), 2)
    left = torch.where(label == 0, matching_image, first_negative)
    right = torch.where(label == 0, first_negative, torch.where(label == 1, matching_image, second_negative))
    return Assignment(left, right, label, candidates > 0)


class TextAssignmentModule(TaskMethod):
    """Three-way classification of a text with two images; its checkpoint starts `NLVR2Module`.

    Defaults are the authors'. There is no distillation, and no evaluation.

    Args:
        vision: the image encoder.
        text: the text and fusion encoder.
        optim: AdamW and its learning rate.
        memory: activation memory.
        weights: initial weights: a checkpoint of the authors (pre-training or this stage), of `ALBEFModule` or of this
            class, or the folder of an export.
        embed_dim: embedding dimension of the contrastive space, in which negatives are similar.
        positives: "image_id" never draws another caption's image or an equal caption as a negative; "diagonal" rules
            out the pair itself alone, as the authors do.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the authors' schedule.
    """

    temperature: Tensor
    new_weights = ("ta_head.",)
    unused_weights = ("text_encoder.cls.",)

    def __init__(
        self,
        vision: VisionSettings = VisionSettings(),
        text: TextSettings = TextSettings(),
        optim: AssignmentOptimSettings = AssignmentOptimSettings(),
        memory: MemorySettings = MemorySettings(),
        weights: str | None = None,
        embed_dim: Annotated[int, COUNT] = 256,
        positives: Literal["image_id", "diagonal"] = "image_id",
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.momentum = None
        self.weights = weights
        self.positives = positives

        self.build(lambda text, recompute: AssignmentNetwork(self.vision, text, embed_dim, recompute))
        self.register_buffer("temperature", torch.tensor([TEMPERATURE]))  # of the pre-training, for its layout

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the three classes, averaged over the texts of all processes."""
        student = self.student
        slice_rows = self.memory.micro_batch_size
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        (tokens,) = in_slices(lambda image: (student.encode_image(image),), slice_rows, batch["image"])
        with torch.no_grad():
            features = student.project_image(tokens)
            images = draw_assignment(features, forbidden_pairs(batch["image_id"], ids, self.positives))
        (logits,) = in_slices(
            lambda *rows: (student.fuse(*rows),), slice_rows, ids, mask, tokens[images.left], tokens[images.right]
        )
        losses = F.cross_entropy(logits, images.label, reduction="none") * images.exists
        loss = losses.sum() / mean_count(images.exists.sum(), logits.dtype)
        self.log_step(loss)
        return loss

    def by_process(self) -> list[str]:
        """Return a clause for each result that depends on how the global batch is divided among the processes."""
        return ["negatives are drawn from the batch of each process"]

    def convert_weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Start both halves of each doubled fusion layer from the same layer of a trained ALBEF."""
        return double_fusion(state, self.text.depth, self.text.fusion_depth)
