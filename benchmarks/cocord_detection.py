"""Fine-tune a distilled ResNet-50 in torchvision's Faster R-CNN on PASCAL VOC (Table 8 of CoCoRD's paper).

    vlightning export last.ckpt backbone.pth --layout torchvision
    python benchmarks/cocord_detection.py backbone.pth --data voc --devices 8
    python benchmarks/cocord_detection.py backbone.pth --data voc --test

The recipe is that of MoCo's detection, which the paper's Table 8 has: R50-C4 (the last stage is the head of the boxes,
with another BatchNorm after it), nothing frozen, BatchNorm over all processes, 24,000 steps of 16 images of 2007's and
2012's trainval split, short side 480 to 800, SGD at 0.02, divided by 10 after 18,000 and 22,000 steps; BatchNorm's
statistics are then computed anew. `--test` tests on 2007's test split. AP50, AP, AP75: CoCoRD 82.0, 55.0, 61.1; CRD
81.7, 54.2, 60.0; the student alone 81.3, 53.5, 58.8.

Differences to detectron2, which the paper's numbers come from (its configs: docs/detection.md): torchvision's anchors
and RoI align without a shift of half a pixel, and its selection of proposals. `--data` is the folder of `VOCdevkit`.
"""

import argparse
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torchvision
from lightning import LightningModule, Trainer, seed_everything
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision.datasets import VOCDetection
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.transforms.v2.functional import horizontal_flip, pil_to_tensor, to_dtype
from torchvision.tv_tensors import BoundingBoxes
from voc_metric import voc_precision

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
SIDES = tuple(range(480, 801, 32))
NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
PRECISE = 200  # batches of BatchNorm's statistics before the test
Sample = tuple[Tensor, dict[str, Tensor]]


class Stages(nn.Sequential):
    """The stem and the first three stages of a ResNet: images [B, 3, H, W] to maps [B, D, H / 16, W / 16]."""

    def __init__(self, body: Any) -> None:
        super().__init__(body.conv1, body.bn1, body.relu, body.maxpool, body.layer1, body.layer2, body.layer3)
        self.out_channels = body.layer4[0].conv1.in_channels


class LastStage(nn.Sequential):
    """The last stage of a ResNet and a BatchNorm: regions [R, D, 14, 14] to features [R, F]."""

    def __init__(self, body: Any) -> None:
        width = body.fc.in_features
        super().__init__(body.layer4, nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def body_of(file: Path, network: str) -> Any:
    """Return a ResNet of torchvision with the exported backbone.

    Raises:
        SystemExit: If the file is not that of the network.
    """
    state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    body = torchvision.models.get_model(network, weights=None)
    own = body.state_dict()
    needed = {name for name in own if not name.startswith("fc.") and not name.endswith("num_batches_tracked")}
    other = needed ^ state.keys() or {name for name in needed if state[name].shape != own[name].shape}
    if other:
        raise SystemExit(
            f"Expected the backbone of {network} in {file}, got another {min(other)}: export it with --layout "
            "torchvision, or set --network."
        )
    body.load_state_dict(own | state)
    return body


def detector(body: Any, classes: int, sides: Sequence[int] = SIDES, **options: Any) -> FasterRCNN:
    """Return Faster R-CNN on the fourth stage's maps (C4), all of whose layers train.

    Args:
        body: a ResNet of torchvision.
        classes: number of classes with the background.
        sides: lengths of the short side in training; the last one is that of evaluation.
        **options: other arguments of `FasterRCNN`.
    """
    return FasterRCNN(
        Stages(body),
        min_size=tuple(sides),
        rpn_anchor_generator=AnchorGenerator(((32, 64, 128, 256, 512),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 14, sampling_ratio=0),
        box_head=LastStage(body),
        box_predictor=FastRCNNPredictor(body.fc.in_features, classes),
        **{"rpn_pre_nms_top_n_train": 12_000, "rpn_pre_nms_top_n_test": 6_000} | options,
    )


class VOC(Dataset[Sample]):
    """Images of a split of PASCAL VOC and their objects, difficult ones too; flipped at random in training.

    Args:
        folder: folder of `VOCdevkit`.
        year: 2007 or 2012.
        split: trainval or test.
    """

    def __init__(self, folder: Path, year: str, split: str) -> None:
        self.images = VOCDetection(str(folder), year, split)
        self.flips = split == "trainval"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        decoded, annotation = self.images[index]
        image = to_dtype(pil_to_tensor(decoded.convert("RGB")), torch.float32, scale=True)
        objects = annotation["annotation"]["object"]
        edges = [[float(each["bndbox"][name]) - 1 for name in ("xmin", "ymin", "xmax", "ymax")] for each in objects]
        boxes = BoundingBoxes(edges, format="XYXY", canvas_size=tuple(image.shape[-2:]))  # type: ignore[arg-type]
        if self.flips and torch.rand(()) < 0.5:
            image, boxes = horizontal_flip(image), horizontal_flip(boxes)
        labels = torch.tensor([CLASSES.index(each["name"]) + 1 for each in objects])
        difficult = torch.tensor([each["difficult"] == "1" for each in objects])
        return image, {"boxes": boxes.as_subclass(Tensor), "labels": labels, "difficult": difficult}


def pairs(samples: Sequence[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Collate images of different sizes and their objects."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detection(LightningModule):
    """Train and test a detector.

    Args:
        model: the detector.
        rate: learning rate.
        steps: number of steps; the rate decays after 3/4 and 11/12 of them.
        warmup: number of steps of the linear warm-up from a thousandth of the rate.
    """

    def __init__(self, model: FasterRCNN, rate: float, steps: int, warmup: int = 100) -> None:
        super().__init__()
        self.model, self.rate, self.steps, self.warmup = model, rate, steps, warmup
        self.results: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the losses of proposals and boxes."""
        losses = self.model(*batch)
        self.log_dict({f"train/{name}": value.detach() for name, value in losses.items()}, batch_size=len(batch[0]))
        return torch.stack(list(losses.values())).sum()

    def on_train_end(self) -> None:
        """Compute BatchNorm's statistics anew, in all processes together."""
        precise_statistics(self.model, islice(self.trainer.train_dataloader, PRECISE), self.device)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Detect the objects."""
        found = self.model(batch[0])
        self.results += zip(
            *([move_data_to_device(one, "cpu") for one in part] for part in (found, batch[1])), strict=True
        )

    def on_test_epoch_end(self) -> None:
        """Log the precision."""
        found, truth = zip(*self.results, strict=True)
        self.log_dict({f"test/{name}": value for name, value in voc_precision(found, truth)._asdict().items()})

    def configure_optimizers(self) -> Any:
        """Return SGD, without weight decay of BatchNorm, and its schedule by steps."""
        norms = {id(p) for part in self.modules() if isinstance(part, NORMS) for p in part.parameters()}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) not in norms], "weight_decay": 1e-4},
            {"params": [p for p in trained if id(p) in norms], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, self.rate, momentum=0.9)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, self.factor), "interval": "step"}]

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        start = 0.001 + 0.999 * min(step / max(self.warmup, 1), 1)
        return start * 0.1 ** ((step >= self.steps * 3 // 4) + (step >= self.steps * 11 // 12))


@torch.no_grad()
def precise_statistics(model: nn.Module, batches: Iterable[Any], device: torch.device) -> None:
    """Replace the moving averages of BatchNorm's statistics by the means over some batches."""
    norms = [part for part in model.modules() if isinstance(part, NORMS)]
    kept = [part.momentum for part in norms]
    for part in norms:
        part.reset_running_stats()
        part.momentum = None  # the mean over all batches
    model.train()
    for batch in batches:
        model(*move_data_to_device(batch, device))
    for part, momentum in zip(norms, kept, strict=True):
        part.momentum = momentum


def main() -> None:
    """Train the detector, and test it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", type=Path, help="an export with --layout torchvision")
    parser.add_argument("--network", default="resnet50", help="name of the ResNet")
    parser.add_argument("--data", type=Path, required=True, help="folder of VOCdevkit")
    parser.add_argument("--folder", type=Path, default=Path("runs/cocord_detection"), help="of logs and the checkpoint")
    parser.add_argument("--steps", type=int, default=24_000)
    parser.add_argument("--batch", type=int, default=16, help="images of all processes together")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="short sides, the last one for the test")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4, help="loader workers of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", action="store_true", help="test the trained detector of the folder on one device")
    options = parser.parse_args()

    seed_everything(options.seed, workers=True)
    model = detector(body_of(options.backbone, options.network), len(CLASSES) + 1, options.sides)
    module = Detection(model, options.rate, options.steps)
    loading: dict[str, Any] = {"num_workers": options.workers, "collate_fn": pairs}
    trained = options.folder / "detector.ckpt"
    logger = CSVLogger(options.folder, name="")
    if options.test:
        module.load_state_dict(torch.load(trained, weights_only=True)["state_dict"])
        Trainer(devices=1, logger=logger).test(module, DataLoader(VOC(options.data, "2007", "test"), 1, **loading))
        return
    images = ConcatDataset([VOC(options.data, year, "trainval") for year in ("2007", "2012")])
    trainer = Trainer(
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        sync_batchnorm=options.devices > 1,
        max_steps=options.steps,
        max_epochs=-1,
        logger=logger,
        enable_checkpointing=False,
    )
    batch = options.batch // options.devices
    trainer.fit(module, DataLoader(images, batch, shuffle=True, drop_last=True, **loading))
    trainer.save_checkpoint(trained, weights_only=True)


if __name__ == "__main__":
    main()
