"""The project's own LightningModule: images and texts with common features."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 8))
        self.words = nn.Embedding(20, 8)

    def encode_images(self, image):
        return F.normalize(self.images(image.mean(dim=(2, 3))), dim=-1)

    def encode_texts(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        return F.normalize((self.words(input_ids) * mask).sum(1) / mask.sum(1), dim=-1)

    def loss(self, batch):
        image = self.encode_images(batch["image"])
        text = self.encode_texts(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(image @ text.T / 0.1, torch.arange(len(image)))

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
