"""Accuracies of nearest neighbours against plain loops, in one and two processes, without an effect on training."""

import pytest
import torch
from lightning import LightningModule

from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import NearestNeighbourClassification
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule


class Encoder(LightningModule):
    """Mean colors of four parts of an image as its features."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def encode_images(self, image):
        return torch.nn.functional.adaptive_avg_pool2d(image, 2).flatten(1) * self.weight, None

    def validation_step(self, batch, batch_idx):
        pass

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def data():
    return ShapeClassesDataModule(length=40, eval_length=30, batch_size=8, image_size=16, num_workers=0, seed=0)


def validated(make, **options):
    fitted = make(callbacks=[NearestNeighbourClassification(data(), k=3, temperature=0.1, transform="own")], **options)
    fitted.validate(Encoder(), data(), verbose=False)
    return {name: float(value) for name, value in fitted.callback_metrics.items()}


def on_rank():
    return validated(lambda callbacks: rank_trainer("ddp", callbacks=callbacks))


def slow():
    """Votes sample by sample."""
    labeled, module = data(), Encoder()
    labeled.setup("fit")

    def encoded(split):
        batches = list(labeled.every_image(split))
        features = torch.cat([module.encode_images(batch["image"])[0] for batch in batches]).detach()
        return torch.nn.functional.normalize(features, dim=1), torch.cat([batch["label"] for batch in batches])

    (known, label), (images, right) = encoded("train"), encoded("validation")
    found = 0
    for image, truth in zip(images, right.tolist(), strict=True):
        cosines = known @ image
        votes = [0.0] * labeled.num_classes
        for place in cosines.argsort(descending=True)[:3].tolist():
            votes[label[place]] += float((cosines[place] / 0.1).exp())
        found += votes.index(max(votes)) == truth
    return 100 * found / len(right)


def test_accuracies_are_those_of_a_slow_loop_in_one_and_two_processes():
    metrics = validated(lambda callbacks: trainer(*callbacks))
    assert metrics["val/neighbours_top1"] == pytest.approx(slow())
    assert 0 < metrics["val/neighbours_top1"] < 100
    for ranks in run_distributed(on_rank):
        assert ranks == pytest.approx(metrics)


def test_wrong_use_is_one_sentence():
    with pytest.raises(UserError, match="Expected k of NearestNeighbourClassification of at least 1, got 0"):
        NearestNeighbourClassification(data(), k=0)
