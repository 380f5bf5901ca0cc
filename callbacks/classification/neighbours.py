"""Classification by the nearest training images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT, POSITIVE
from ...metrics.classification import nearest_neighbours
from ..distributed.collectives import gather_uneven
from ..modules import features_of
from .image_classification import ImageClassification


class NearestNeighbourClassification(ImageClassification):
    """Classify the labeled images of another datamodule by its training images that are nearest, and log accuracies.

    Each of the `k` training images with the largest cosines votes for its class with the weight exp(cosine /
    temperature). Measurement and metrics are as in `ZeroShotClassification`: after validation, in percent,
    "val/<name>_top1", "val/<name>_top5" where there are more than five classes, and "val/<name>_class_recall"; after
    test the same with "test/".

    The module has `encode_images(image)`, which returns features [B, E] (or a tuple that starts with them). For each
    measurement it encodes the training images anew, without augmentation; processes share them.

    Args:
        data: Datamodule of labeled images with `every_image(split)`, such as `ImageClassificationDataModule`, with a
            training split beside that for validation or test. This callback sets it up; it is not part of the Trainer.
        k: Number of neighbours (DINO: 20).
        temperature: Temperature of the votes (DINO: 0.07).
        name: Name of the metrics.
        every_n_epochs: Epochs of training between two measurements in validation.
        transform: "trainer" prepares the images by `eval_transform` of the trainer's datamodule, if it has one, since
            a model must see images as those that it was trained on; "own" leaves that to `data`.

    Raises:
        UserError: If an argument is invalid, a label has no class, the data has no images, or the module cannot
            encode images.
    """

    module_needs = ("encode_images",)
    module_does = "encodes images"

    def __init__(
        self,
        data: LightningDataModule,
        k: Annotated[int, COUNT] = 20,
        temperature: Annotated[float, POSITIVE] = 0.07,
        name: str = "neighbours",
        every_n_epochs: int = 1,
        transform: Literal["trainer", "own"] = "trainer",
    ) -> None:
        super().__init__(data, name, every_n_epochs, transform)
        self.k = k
        self.temperature = temperature

    @override
    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().check(trainer, pl_module)
        if not hasattr(self.data, "every_image"):
            raise UserError(
                f"Expected data with every_image() for {self}, got {type(self.data).__name__} without: give an "
                "ImageClassificationDataModule."
            )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "predict":
            self.data.setup("fit")  # the training images

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage != "predict":
            self.data.teardown("fit")

    @override
    def advice_on_labels(self, classes: int) -> str:
        return f"give data whose labels occur in its training split; there are {classes} classes there."

    @override
    def scorer(self, trainer: Trainer, pl_module: Any) -> Callable[[Tensor], Tensor]:
        def features(image: Tensor) -> Tensor:
            return normalize(features_of(trainer, pl_module.encode_images, image).float(), dim=-1)

        train_features, label = self._training_features(trainer, features)
        classes = max(int(getattr(self.data, "num_classes", 0)), int(label.max()) + 1)
        scores = self.classifier(train_features, label, classes)
        return lambda image: scores(features(image))

    def classifier(self, train_features: Tensor, label: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
        """Return a function of unit features [B, E] to class scores [B, C].

        Args:
            train_features: unit features [M, E] of the training images.
            label: their labels, long [M].
            classes: number of classes C.
        """
        return lambda features: nearest_neighbours(features, train_features, label, classes, self.k, self.temperature)

    def _training_features(self, trainer: Trainer, features: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return features [M, E] and labels [M] of all training images of all processes."""
        data: Any = self.data
        parts = []
        labels = []
        for batch in data.every_image("train"):
            parts.append(features(batch["image"].to(trainer.strategy.root_device)))
            labels.append(batch["label"])
        train_features = gather_uneven(torch.cat(parts))
        if bad := int((~train_features.isfinite().all(1)).sum()):
            rank_zero_warn(
                f"{self} found non-finite features for {bad} of {len(train_features)} training images: no votes."
            )
        return train_features, gather_uneven(torch.cat(labels)).to(train_features.device)
