"""MoCo on random vectors: a momentum teacher and a queue in a plain LightningModule."""

import copy

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from vlightning.callbacks import (
    EMACallback,
    EMAPair,
    FeatureQueue,
    QueueCallback,
    missing_callbacks,
)


class PlainMoCo(LightningModule):
    def __init__(self, dim: int = 16, queue_size: int = 50, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = temperature
        self.student = nn.Sequential(nn.Linear(dim, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.queue = FeatureQueue(queue_size, dim=8)

    def momentum_pairs(self) -> dict[str, EMAPair]:
        return {"teacher": EMAPair(source="student", target="teacher", momentum=0.9)}

    def queues(self) -> dict[str, FeatureQueue]:
        return {"vectors": self.queue}

    def configure_callbacks(self) -> list[Callback]:
        return missing_callbacks(self.trainer.callbacks, EMACallback(), QueueCallback())

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, object]:
        query = F.normalize(self.student(batch + 0.1 * torch.randn_like(batch)), dim=1)
        with torch.no_grad():
            key = F.normalize(self.teacher(batch + 0.1 * torch.randn_like(batch)), dim=1)
        positive = (query * key).sum(dim=1, keepdim=True)
        negative = (query @ self.queue.features.T).masked_fill(~self.queue.valid, -torch.inf)
        similarity = torch.cat([positive, negative], dim=1) / self.temperature
        loss = F.cross_entropy(similarity, similarity.new_zeros(len(batch), dtype=torch.long))
        self.log("train/loss", loss)
        return {"loss": loss, "keys": {"vectors": key}}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-2)
