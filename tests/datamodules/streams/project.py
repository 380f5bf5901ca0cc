"""Another project's module, which trains on a stream of tar files and Parquet."""

import lightning.pytorch as pl
import torch
from torchvision.transforms import v2

from vlightning.datamodules.streams import BadSample, StreamedPair, stream_loader

augment = v2.Compose([v2.RandomResizedCrop(16), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])


def prepare(pair: StreamedPair):
    """Runs in a loader worker; what it draws is a function of (seed, epoch, row)."""
    text = " ".join(pair.captions)
    if not text:
        raise BadSample("no caption", pair.item.name)  # is counted, and replaced by another row of its shard
    return {"image": augment(pair.image()), "length": len(text), "index": pair.index}


class Project(pl.LightningModule):
    def __init__(self, sources, workers=0):
        super().__init__()
        self.sources, self.workers = sources, workers
        self.layer = torch.nn.Linear(3, 1)

    def train_dataloader(self):
        return stream_loader(
            self.sources,  # as in ["s3://bucket/pairs/*.tar", {"path": "more/*.parquet", "weight": 2}]
            prepare,
            global_batch_size=4,
            samples_per_epoch=20,
            trainer=self.trainer,
            num_workers=self.workers,
            max_bad_share=0.2,
        )

    def training_step(self, batch, batch_idx):
        lengths = self.layer(batch["image"].mean(dim=(2, 3)))[:, 0]
        return ((lengths - batch["length"]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)
