"""Linear probing: how well a frozen network's features tell the classes of another data set apart."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ...callbacks.distributed.collectives import all_reduce_sum, gather_uneven, world_size
from ..base.data_sizes import DataSizes
from ..base.frozen import FrozenTeacher
from ..evaluation.classification import Accuracy, Batch, ClassifierModule
from ..networks.cifar import Classifier
from ..networks.cifar.classifier import init_linear
from ..networks.classifiers import build_classifier
from ..networks.frozen_classifier import load_frozen


class LinearProbeModule(ClassifierModule):
    """One linear layer on the pooled features of a frozen network.

    The network is in eval mode always, so its statistics of BatchNorm stay those it was trained with, and each training
    image is encoded once, when training starts. Hence there is no augmentation. Training batches hold `label` [B] and
    `sample_index` [B] only; images that cannot be read have no features and never train.

    The paper gives no recipe. The defaults are those of the nearest public implementation, giakoumoglou/distillers,
    which trains 120 epochs in batches of 64 with augmentation, and in train mode.

    The network is not in the checkpoint, which names it and holds a fingerprint of its weights.

    Shapes: B images, D features, C classes, M training images that can be read.

    Args:
        network: name of a CIFAR network (`wrn_16_2`, `resnet8x4`, ...), or of a model of torchvision or timm.
        network_classes: number of classes that its weights were trained for (CIFAR-100: 100).
        weights: the network's file (an export, a checkpoint of CoCoRDModule whose student it was, or a public one of
            the CRD benchmark), the folder of the run that trained it, whose newest last checkpoint is taken, or the
            name of the library's own weights, such as IMAGENET1K_V1.
        num_classes: classes to tell apart. The command line sets it from the data's, where that is given.
        learning_rate: learning rate at the start (that implementation: 0.05, and 0.01 for MobileNets and ShuffleNets).
        lr_milestones: epochs after which the learning rate falls (that implementation).
        lr_decay: factor by which the learning rate is multiplied at each milestone (that implementation).
        momentum: momentum of SGD (that implementation).
        weight_decay: weight decay of SGD, on weight and bias (that implementation).

    Raises:
        ValueError: for an unknown network.
    """

    def __init__(
        self,
        network: str = "wrn_16_2",
        network_classes: int = 100,
        weights: str | None = None,
        num_classes: int = 10,
        learning_rate: float = 0.05,
        lr_milestones: list[int] = [30, 60, 90],  # noqa: B006  (jsonargparse shows it as the default)
        lr_decay: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone: FrozenTeacher[Classifier] = FrozenTeacher(
            build_classifier(network, network_classes), role="backbone", argument="model.weights"
        )
        self.linear = nn.Linear(self.backbone.network.feature_dim, num_classes)
        init_linear(self.linear)  # N(0, 0.01^2) and zero, as in that implementation
        self.accuracy = Accuracy()
        # Not buffers: they are for this training set, and not for the checkpoint.
        self._features: Tensor | None = None  # [M, D]
        self._rows: Tensor | None = None  # [M] on the host, ascending: the sample_index of each

    def views(self) -> list[str]:
        """Nothing: a training batch holds no images."""
        return []

    def setup(self, stage: str) -> None:
        """Load the network."""
        hparams = self.hparams
        load_frozen(self.backbone, hparams["network"], hparams["weights"], hparams["network_classes"])

    def configure_model(self) -> None:
        """Lay out convolutions as they run fastest."""
        self.backbone.to(memory_format=torch.channels_last)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the network, and what its weights were."""
        self.backbone.save_record(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the network with that of the checkpoint.

        Raises:
            ValueError: if its weights are others.
        """
        super().on_load_checkpoint(checkpoint)
        self.backbone.compare(checkpoint)

    def data_sizes(self) -> DataSizes:
        """The size that the network asks for, if it does."""
        return DataSizes(self.backbone.network.image_size)

    def on_fit_start(self) -> None:
        """Compare class counts, and encode every training image.

        Raises:
            ValueError: if the data has another number of classes, or is not of labelled images in one list.
            RuntimeError: if no image can be read.
        """
        data = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "every_image"):
            raise ValueError(
                f"Found {type(data).__name__ if data is not None else 'no datamodule'}, expected one that reads each "
                "training image once: use ImageClassificationDataModule, or another with `every_image`."
            )
        assert data is not None
        self.check_classes()
        self._encode_all(data)

    def on_fit_end(self) -> None:
        """Let go of the features."""
        self._features = self._rows = None

    def _encode_all(self, data: Any) -> None:
        """Encode each training image once, and give every process the features of all."""
        precision = self.trainer.precision_plugin
        features, rows = [], []
        for batch in data.every_image("train"):
            self.compare_sizes(batch)
            # As in validation_step, where Lightning sees to this: the layer is to train on what it will be given.
            with precision.forward_context():
                features.append(self.encode(precision.convert_input(batch["image"].to(self.device))))
            rows.append(batch["sample_index"].to(self.device))
        # Among several processes every one has batches, if empty ones, so all of them get here.
        found = gather_uneven(torch.cat(rows)) if rows else torch.empty(0)
        if not len(found):
            raise RuntimeError("Found no training image that can be read, expected some: see the warnings above.")
        rows_there, order = found.sort()
        self._features = gather_uneven(torch.cat(features))[order]
        self._rows = rows_there.cpu()
        rank_zero_info(f"Linear probe: encoded {len(found)} training images, once and without augmentation.")

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Images [B, 3, H, W] to the frozen network's features [B, D]."""
        return self.backbone.network.forward_features(image.contiguous(memory_format=torch.channels_last))

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Look up the features of a training batch while it is on the host, which would wait for the device later."""
        return batch if "image" in batch else batch | self._look_up(batch)

    def _look_up(self, batch: Batch) -> Batch:
        """Of the images [B]: rows [K] of the features, and labels [K], of those K that have features."""
        assert self._rows is not None
        sample_index = batch["sample_index"].cpu()
        place = torch.searchsorted(self._rows, sample_index).clamp(max=len(self._rows) - 1)
        known = self._rows[place] == sample_index
        return {"feature_row": place[known], "known_label": batch["label"].cpu()[known]}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy, over the images of all processes that have features."""
        assert self._features is not None
        row, label = batch["feature_row"], batch["known_label"]
        total = F.cross_entropy(self.linear(self._features[row]).float(), label, reduction="sum")
        size, known = len(batch["label"]), len(row)
        # DDP averages gradients over processes, which may have different numbers of such images.
        loss = total * world_size() / all_reduce_sum(torch.full((), known, device=row.device)).clamp(min=1)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=size)
        left_out = torch.full((), float(size - known), device=row.device)
        self.log("train/left_out", left_out, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def forward(self, image: Tensor) -> Tensor:
        """Images [B, 3, H, W] to logits [B, C]."""
        logits: Tensor = self.linear(self.encode(image))
        return logits
