"""Linear probing of a frozen classifier on another data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.distributed.collectives import all_reduce_sum, gather_uneven, world_size
from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.method import Method
from ..core.data_sizes import DataSizes
from ..core.fitting import load_fitting
from ..core.frozen import Frozen
from ..evaluation.classification import ClassificationEvaluation, check_classes
from ..networks.cifar import Classifier
from ..networks.cifar.classifier import init_linear
from ..networks.classifier_files import load_frozen
from ..networks.classifiers import build_classifier
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import sgd
from ..optim.schedules import Milestones
from .settings import ProbeOptimSettings

Batch = dict[str, Tensor]
_BACKBONE = "backbone.network."


class CoCoRDLinearProbeModule(Method):
    """Train one linear layer on the pooled features of a frozen network.

    The network is always in eval mode, and encodes each training image once when training starts. Hence there is no
    augmentation, and training batches hold `label` [B] and `sample_index` [B] only. Images that cannot be read have no
    features and do not train.

    The paper gives no recipe. The defaults are those of the nearest public implementation, giakoumoglou/distillers,
    which trains 120 epochs in batches of 64 with augmentation and in train mode.

    Shapes: B images, D features, C classes, M training images that can be read.

    Args:
        network: name of a CIFAR network (`wrn_16_2`, `resnet8x4`, ...), or of a model of torchvision or timm.
        network_classes: number of classes that its weights were trained for (CIFAR-100: 100).
        weights: a file (export, checkpoint of a `CoCoRDModule` with this student, or public checkpoint of the CRD
            benchmark); the folder of a run, whose newest last checkpoint is used; or the name of the library's weights,
            such as IMAGENET1K_V1.
        num_classes: number of classes C. The command line sets it from the data.
        optim: SGD and its schedule.
        optimizer: replaces SGD.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: For an unknown network.
    """

    optim: ProbeOptimSettings
    views: tuple[str, ...] = ()
    """Names of the augmented views in a training batch, which the datamodule provides."""

    def __init__(
        self,
        network: str = "wrn_16_2",
        network_classes: Annotated[int, COUNT] = 100,
        weights: str | None = None,
        num_classes: Annotated[int, COUNT] = 10,
        optim: ProbeOptimSettings = ProbeOptimSettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.weights = weights
        self.num_classes = num_classes
        self.network = network
        self.network_classes = network_classes
        self.backbone: Frozen[Classifier] = Frozen(
            build_classifier(network, network_classes), role="backbone", argument="model.weights"
        )
        self.linear = nn.Linear(self.backbone.network.feature_dim, num_classes)
        init_linear(self.linear)  # N(0, 0.01^2) and zero, as in giakoumoglou/distillers
        self.evaluation = ClassificationEvaluation()
        # Not buffers: they depend on the training set and are not saved.
        self._features: Tensor | None = None  # [M, D]
        self._rows: Tensor | None = None  # sample_index of each row [M], ascending, on the host

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross entropy, averaged over the images of all processes that have features."""
        assert self._features is not None
        logits = self.linear(self._features[batch["feature_row"]])
        total = F.cross_entropy(logits.float(), batch["feature_label"], reduction="sum")
        images = len(batch["label"])
        with_features = len(logits)
        # DDP averages gradients over processes, whose batches may have different numbers of readable images.
        with_features_everywhere = all_reduce_sum(torch.full((), with_features, device=self.device))
        loss = total * world_size() / with_features_everywhere.clamp(min=1)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=images)
        left_out = torch.full((), images - with_features, dtype=torch.float32, device=self.device)
        self.log("train/left_out", left_out, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, C]."""
        logits: Tensor = self.linear(self.encode(image))
        return logits

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the frozen network's features [B, D]."""
        return self.backbone.network.forward_features(image.contiguous(memory_format=torch.channels_last))

    def setup(self, stage: str) -> None:
        """Load the network."""
        super().setup(stage)
        load_frozen(self.backbone, self.network, self.weights, self.network_classes)

    def pretrained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state with the backbone, which computes the features."""
        network = self.backbone.network.state_dict()
        return state | {f"{_BACKBONE}{name}": tensor for name, tensor in network.items()}

    def load_pretrained_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load the state of an export with its backbone, or of a checkpoint without."""
        backbone = {name.removeprefix(_BACKBONE): state[name] for name in state if name.startswith(_BACKBONE)}
        super().load_pretrained_state({name: state[name] for name in state if not name.startswith(_BACKBONE)}, source)
        if backbone:
            load_fitting(self.backbone.network, backbone, f"the backbone of {source}")
            self.backbone.record(self.network, source)

    def find_networks(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the backbone that the checkpoint names."""
        self.backbone.compare(checkpoint)
        load_frozen(self.backbone, self.network, checkpoint["hyper_parameters"]["weights"], self.network_classes)

    def evaluates_initial_weights(self) -> bool:
        """Return False: `weights` are the backbone's, which `setup` loads."""
        return False

    def configure_model(self) -> None:
        """Use the memory format in which convolutions run fastest."""
        super().configure_model()
        self.backbone.to(memory_format=torch.channels_last)

    def data_sizes(self) -> DataSizes:
        """Return the image size that the network requires, if it does."""
        return DataSizes(self.backbone.network.image_size)

    def on_fit_start(self) -> None:
        """Check the number of classes, and encode all training images.

        Raises:
            UserError: If the datamodule has another number of classes, cannot read each image once, or no image can be
                read.
        """
        super().on_fit_start()
        if not hasattr(self.datamodule, "every_image"):
            name = "none" if self.datamodule is None else type(self.datamodule).__name__
            raise UserError(
                f"Expected a datamodule that reads each training image once, got {name}: use "
                "ImageClassificationDataModule, or another with `every_image`."
            )
        check_classes(self, self.num_classes)
        self._encode_all(self.datamodule)

    def on_fit_end(self) -> None:
        """Free the features."""
        super().on_fit_end()
        self._features = self._rows = None

    def _encode_all(self, data: Any) -> None:
        """Encode each training image once, and gather the features in every process."""
        precision = self.trainer.precision_plugin
        features = []
        rows = []
        for batch in data.every_image("train"):
            self.compare_sizes(batch)
            # The same precision as in `validation_step`, for which Lightning enters this context.
            with precision.forward_context():
                features.append(self.encode(precision.convert_input(batch["image"].to(self.device))))
            rows.append(batch["sample_index"].to(self.device))
        # Every process has a batch, which may be empty, so that all processes gather.
        all_rows = gather_uneven(torch.cat(rows)) if rows else torch.empty(0)
        if not len(all_rows):
            raise UserError("Expected training images that can be read, got none: see the warnings above.")
        sorted_rows, order = all_rows.sort()
        self._features = gather_uneven(torch.cat(features))[order]
        self._rows = sorted_rows.cpu()
        rank_zero_info(f"Linear probe: encoded {len(all_rows)} training images once, without augmentation.")

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Add rows of the features and labels [K] of the K images of a training batch [B] that have features.

        They are looked up on the host, without waiting for the device.
        """
        if "image" in batch:
            return batch
        assert self._rows is not None
        sample_index = batch["sample_index"].cpu()
        position = torch.searchsorted(self._rows, sample_index).clamp(max=len(self._rows) - 1)
        has_features = self._rows[position] == sample_index
        return batch | {"feature_row": position[has_features], "feature_label": batch["label"].cpu()[has_features]}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one group: weight and bias decay."""
        return [{"params": list(self.linear.parameters())}]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return SGD with momentum."""
        return sgd(self, self.optim.learning_rate, self.optim.momentum, self.optim.weight_decay)

    def paper_schedule(self) -> Milestones:
        """Return a learning rate that decays at the milestones."""
        return Milestones(self.optim.learning_rate, self.optim.lr_milestones, self.optim.lr_decay)
