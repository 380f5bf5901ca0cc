"""A method of image-text pairs in one file: two linear towers with CLIP's loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from vlightning.lightning_modules.base.example_batch import pair_batch
from vlightning.lightning_modules.base.method import Method
from vlightning.lightning_modules.evaluation.retrieval import RetrievalEvaluation
from vlightning.lightning_modules.optim.optimizers import adamw


@dataclass(frozen=True)
class VisionSettings:
    """Images.

    Args:
        image_size: side of the images.
    """

    image_size: int = 16


@dataclass(frozen=True)
class TextSettings:
    """Texts.

    Args:
        vocab_size: number of words.
        max_tokens: tokens of the longest text.
    """

    vocab_size: int = 200
    max_tokens: int = 16


class Towers(nn.Module):
    """Linear towers of images [B, 3, S, S] and of texts [B, L]; features are of unit length [B, E]."""

    def __init__(self, side: int, words: int, embed_dim: int) -> None:
        super().__init__()
        self.image = nn.Linear(3 * side**2, embed_dim)
        self.words = nn.Embedding(words, embed_dim)
        self.logit_scale = nn.Parameter(torch.ones(1))

    def encode_image(self, image: Tensor) -> Tensor:
        return F.normalize(self.image(image.flatten(1)), dim=-1)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return F.normalize((self.words(input_ids) * attention_mask[..., None]).sum(1), dim=-1)


class ToyPairs(Method):
    """Contrast of images and texts.

    Args:
        vision: images.
        text: texts.
        embed_dim: embedding dimension E.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the constant learning rate.
    """

    vision: VisionSettings
    text: TextSettings
    evaluation_note = "a toy"

    def __init__(
        self,
        vision: VisionSettings = VisionSettings(),
        text: TextSettings = TextSettings(),
        embed_dim: int = 8,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.student = Towers(self.vision.image_size, self.text.vocab_size, embed_dim)
        self.evaluation = RetrievalEvaluation(None)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        image = self.student.encode_image(batch["image"])
        text = self.student.encode_text(batch["input_ids"], batch["attention_mask"])
        logits = self.student.logit_scale.exp() * image @ text.T
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        return self.student.encode_image(image), None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.student.encode_text(input_ids, attention_mask)

    def sharded_networks(self) -> list[nn.Module]:
        return [self.student]

    def network_methods(self) -> Sequence[str]:
        return "encode_image", "encode_text"

    def module_methods(self) -> Sequence[str]:
        return "encode_images", "encode_texts"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        return pair_batch(self, rows, data)

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        return adamw(groups, 0.01, 0.0, (0.9, 0.98))
