"""Base of all datamodules of labelled images: presets, views, classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from torch import nn

from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.contract import ExpectsPreprocessing, NamesViews, asked_of
from ..base.faults import Account
from ..base.images import ImageTransforms
from ..base.loaders import BatchLoader
from ..base.sampled import SampledDataModule
from ..base.stages import Split
from ..transforms.classification import (
    CIFAREvalTransform,
    CIFARTrainTransform,
    ImageNetEvalTransform,
    ImageNetTrainTransform,
)
from ..transforms.clip import pair_eval_transform
from ..transforms.normalize import in_pixels
from .samples import LabelCollate, LabelledEvaluationSet, LabelledRows, LabelReader, readable_label

Preset = Literal["cifar", "imagenet"]


class LabelDataModule(ImageTransforms, SampledDataModule):
    """Labelled images, in batches of the project's contract (dicts of tensors).

    A training batch holds `label` [B], `sample_index` [B] and float [B, 3, H, W] for each view, augmented
    independently; an evaluation batch holds one view, `image`, without augmentation. A subclass defines the rows in
    `open_split`, and `num_classes`.

    Args:
        preset: default transforms: "cifar" pads by 4, crops and flips; "imagenet" crops at random and
            flips, and evaluates the center crop. None for the preprocessing of the module's checkpoint, else "cifar".
        image_size: side of the square images, pixels; by default that of the module, else 32 for "cifar"
            and 224 for "imagenet".
        augment: whether training augments; false uses the evaluation transform in training too.
        views: names of the augmented views of a training image; by default those of the module's attribute
            `views`, or "image" alone. With an empty list no training images are read.
        train_transform: RGB image to float [3, H, W], for training; by default the preset's.
        eval_transform: RGB image to float [3, H, W], for evaluation and prediction; by default the preset's.
        **options: see `SampledDataModule`.
    """

    asks: ClassVar[tuple[type, ...]] = (ExpectsPreprocessing, NamesViews)

    def __init__(
        self,
        *,
        preset: Preset | None = None,
        image_size: Annotated[int | None, COUNT] = None,
        augment: bool = True,
        views: list[str] | None = None,
        train_transform: nn.Module | None = None,
        eval_transform: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._train_transform = train_transform if augment else eval_transform
        self._eval_transform = eval_transform
        self._views = views
        self._preset, self._side, self._augment = preset, image_size, augment

    def default_train_transform(self) -> nn.Module:
        """Return the preset's training transform, with the normalization that the module's checkpoint expects."""
        if not self._augment:
            return self.default_eval_transform()
        kind, size = self._preset_and_size()
        training = {"cifar": CIFARTrainTransform, "imagenet": ImageNetTrainTransform}[kind]
        expected = self.expected_preprocessing() if self._preset is None else {}
        return training(size, **{name: expected[name] for name in ("mean", "std") if name in expected})

    def default_eval_transform(self) -> nn.Module:
        """Return the transform that the module's checkpoint expects if no preset was given, else the preset's."""
        expected, (kind, size) = self.expected_preprocessing(), self._preset_and_size()
        if self._preset is None and "mean" in expected:
            return pair_eval_transform(size, expected)
        return {"cifar": CIFAREvalTransform, "imagenet": ImageNetEvalTransform}[kind](size)

    def _preset_and_size(self) -> tuple[Preset, int]:
        """Return the preset of the default transforms, and the side of the images."""
        expected = self.expected_preprocessing() if self._preset is None else {}
        crops = expected.get("resize_mode") == "shortest"
        kind: Preset = self._preset or ("imagenet" if crops else "cifar")
        return kind, self._side or expected.get("image_size") or {"cifar": 32, "imagenet": 224}[kind]

    @property
    def views(self) -> list[str]:
        """Names of the augmented views of a training image.

        Raises:
            UserError: If the module names a view twice.
        """
        if self._views is not None:
            return self._views
        module = asked_of(self.trainer, NamesViews)  # type: ignore[type-abstract]
        names = ["image"] if module is None else list(module.views)
        if len(set(names)) < len(names):
            name = f"{type(module).__name__}.views"
            raise UserError(f"Expected different names of views from {name}, got {names}: rename the duplicates.")
        return names

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        raise NotImplementedError

    def every_image(self, split: Split) -> BatchLoader:
        """Iterate once over the images of a split, preprocessed as in evaluation; unusable images are skipped.

        This is for computations on all training images before training, such as features.

        Args:
            split: a split that is set up.

        Raises:
            UserError: If the split is not set up.
        """
        loader: BatchLoader = self._evaluation_loader(split)
        loader.account = Account(split, self.max_bad_share, "skipped")  # so that the counts of training do not change
        loader.finish = partial(self.normalized_batch, training=False)  # no trainer transfers these
        return loader

    def training_labels(self) -> list[int]:
        """Return the label of each training image by `sample_index`; -1 for an image without a readable label.

        Raises:
            UserError: If the training split is not set up.
        """
        return self.evaluation_labels(self._opened("train"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, and the preprocessing of evaluation."""
        return super().state_dict() | {"preprocessing": self.preprocessing}

    def training_reader(self, rows: LabelledRows) -> LabelReader:
        """Return a reader of augmented views with a label."""
        return LabelReader(rows, self.worker_transform(training=True), len(self.views))

    def training_collate(self) -> LabelCollate:
        """Stack the views."""
        return LabelCollate(self.views)

    def evaluation_labels(self, rows: LabelledRows) -> list[int]:
        """Return the class index of each row; -1 for a row without a readable label."""
        labels = (readable_label(rows, row) for row in range(len(rows)))
        return [-1 if label is None else label for label in labels]

    def evaluation_set(self, rows: LabelledRows, items: Sequence[int], split: Split) -> LabelledEvaluationSet:
        """Return a dataset of images with labels."""
        return LabelledEvaluationSet(rows, self.worker_transform(training=False), self.run_seed)

    def evaluation_collate(self) -> LabelCollate:
        """Stack the images."""
        return LabelCollate(["image"], in_pixels(self.eval_transform))
