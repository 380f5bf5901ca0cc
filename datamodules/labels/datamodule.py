"""Datamodule of labeled images on disk or on the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from torch import nn

from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.contract import NamesViews, asked_of
from ..base.decode import MAX_PIXELS
from ..base.faults import Account
from ..base.images import ImageTransforms
from ..base.loaders import BatchLoader
from ..base.sampled import SampledDataModule
from ..base.samples import EvaluationRows
from ..base.stages import Split
from ..reading.division import DividedSources
from ..reading.layout import Layout
from ..reading.open import Opening, open_split
from ..reading.resolve import Sources, by_split
from ..transforms.albef import pair_eval_transform
from ..transforms.classification import (
    CIFAREvalTransform,
    CIFARTrainTransform,
    ImageNetEvalTransform,
    ImageNetTrainTransform,
)
from ..transforms.normalize import in_pixels
from .rows import LabelTable
from .samples import LabelCollate, LabeledRows, LabelReader, labels_of

Preset = Literal["cifar", "imagenet"]


class LabelDataModule(ImageTransforms, SampledDataModule):
    """Labeled images, in batches of the project's contract (dicts of tensors).

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
    """

    asks: ClassVar[tuple[type, ...]] = (NamesViews,)

    def __init__(
        self,
        *,
        preset: Preset | None = None,
        image_size: Annotated[int | None, COUNT] = None,
        augment: bool = True,
        views: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not augment:
            self._train_transform = self._eval_transform
        self._views = views
        self._preset = preset
        self._image_size = image_size
        self._augment = augment

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
        return kind, self._image_size or expected.get("image_size") or {"cifar": 32, "imagenet": 224}[kind]

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

    def training_reader(self, rows: LabeledRows) -> LabelReader:
        """Return a reader of augmented views with a label."""
        return LabelReader(rows, self.worker_transform(training=True), len(self.views))

    def training_collate(self) -> LabelCollate:
        """Stack the views."""
        return LabelCollate(self.views)

    def evaluation_labels(self, rows: LabeledRows) -> list[int]:
        """Return the class index of each row; -1 for a row without a readable label."""
        return labels_of(rows)

    def evaluation_set(self, rows: LabeledRows, items: Sequence[int], split: Split) -> EvaluationRows:
        """Return a dataset of images with labels."""
        return EvaluationRows(
            len(rows), LabelReader(rows, self.worker_transform(training=False), views=1), self.run_seed
        )

    def evaluation_collate(self, split: Split) -> LabelCollate:
        """Stack the images."""
        return LabelCollate(["image"], in_pixels(self.eval_transform))


class ImageClassificationDataModule(DividedSources, LabelDataModule):
    """Labeled images from Parquet, JSON or CSV lists, folders with one folder per class, tar files, or the hub.

    Labels are integers from 0, or names, one for each image. Names are numbered in the order in which the source lists
    them, or else in sorted order; true and false in JSON are the names "True" and "False". A string of digits is an
    integer.

    Args:
        train: training rows: a file, glob pattern, folder or hub name, a `Source`, or a list of these. Files:
            `.parquet`, `.json`, `.jsonl`, `.csv`, `.tar` in WebDataset's form (the label in the member that
            `label_column` names, such as `cls`). Folders: of such files, of images in one folder per class,
            saved by `datasets`, or of Oxford-IIIT Pet or Food-101 as their authors publish them.
        validation: rows for validation, in the same forms. For data sets without such a split: a `Source` with
            `split: test`.
        test: rows for testing, in the same forms.
        predict: rows for prediction; labels are optional, and image folders need no folders of classes.
        image_root: folder that relative image paths start from; by default the folder of the file that names them.
        image_column: column of the images (CIFAR on the hub: `img`).
        label_column: column of the labels (CIFAR-100 on the hub: `fine_label`).
        num_classes: number of classes; by default the number of names in the source, else the largest training label
            plus one, of which at least half must occur.
        class_names: names of the classes 0, 1, ...; by default those of the training rows.
        max_pixels: images with more pixels are refused before they are decoded.
        limit_train_rows: number of training rows to use, evenly spaced in each source; for trials.
        cache_dir: folder for the memory-mapped copies of the `datasets` library.
    """

    divides_labels: ClassVar[bool] = True

    def __init__(
        self,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        image_root: str | None = None,
        image_column: str = "image",
        label_column: str = "label",
        num_classes: Annotated[int | None, COUNT] = None,
        class_names: list[str] | None = None,
        max_pixels: Annotated[int, COUNT] = MAX_PIXELS,
        limit_train_rows: Annotated[int | None, COUNT] = None,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.max_pixels = max_pixels
        self.limit_train_rows = limit_train_rows
        self.sources = self.divided(by_split(train, validation, test, predict))
        self.opening = Opening(image_root, image_column, label_column, None, cache_dir, labels=True)
        self._num_classes = num_classes
        self._names = tuple(class_names) if class_names is not None else None

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        sources = open_split(self.opening, self.sources, split, self.division)
        if split == "train" and self.limit_train_rows is not None:
            sources = [(dataset, _thinned(layout, dataset, self.limit_train_rows)) for dataset, layout in sources]
        return sources

    def open_split(self, split: Split) -> LabelTable | None:
        """Open and check the rows of a split."""
        sources = self.open_sources(split)
        if not sources:
            return None
        rows = LabelTable(sources, self.max_pixels)
        rows.check(split)
        return rows

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and check that their labels are classes of training.

        Raises:
            UserError: If a split cannot be used, or a label is not a class.
        """
        super().setup(stage)
        if "train" in self._rows:
            for split in self._rows:
                self._set_class_indices(split)

    def _evaluation_loader(self, split: Split, limited: bool = False) -> Any:
        # Not in `setup`, since the checkpoint with the classes of training is restored after it.
        self._set_class_indices(split)
        return super()._evaluation_loader(split, limited)

    def _set_class_indices(self, split: Split) -> None:
        rows = self._opened(split)
        if rows.has_labels and split != "predict":  # prediction does not read labels
            rows.set_class_indices(self.class_names, self.num_classes, split)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes by index; None if the data has only indices."""
        if self._names is None and (rows := self._label_rows()) is not None:
            self._names = rows.class_names()
        return self._names

    @property
    def num_classes(self) -> int:
        """Number of classes.

        Raises:
            UserError: If the number is neither given nor in the data, differs from the number of names, or is that of
                integer labels that do not number the classes.
        """
        names = self.class_names
        if self._num_classes is None:
            rows = self._label_rows()
            number = len(names) if names else rows.count_classes() if rows is not None else None
            if number is None:
                raise UserError("Expected labels to count the classes, got none: set data.num_classes.")
            self._num_classes = number
        if names and len(names) > self._num_classes:
            raise UserError(
                f"Expected at most data.num_classes={self._num_classes} class names, got {len(names)}, such as "
                f"{names[-1]!r}: set data.num_classes to {len(names)}."
            )
        # An evaluation split or a part of the training rows may lack some of the classes.
        if names and len(names) < self._num_classes and "train" in self._rows and self.limit_train_rows is None:
            raise UserError(
                f"Expected data.num_classes={self._num_classes} classes in the training data, got {len(names)}, from "
                f"{names[0]!r} to {names[-1]!r}: set data.num_classes to {len(names)}."
            )
        return self._num_classes

    def _label_rows(self) -> LabelTable | None:
        """Return the rows that define the classes: the training rows, or else any split with labels."""
        if "train" not in self._rows and self.sources["train"] and (rows := self.open_split("train")) is not None:
            self._rows["train"] = rows
        ordered = sorted(self._rows, key=lambda split: split != "train")
        return next((self._rows[split] for split in ordered if self._rows[split].has_labels), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, and the classes of training."""
        counted = self._num_classes is not None or bool(self._rows)
        names = self.class_names if counted else None
        return super().state_dict() | {
            "class_names": list(names) if names else None,
            "num_classes": self.num_classes if counted else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed of a checkpoint, and its classes if none are given."""
        super().load_state_dict(state_dict)
        names = state_dict.get("class_names")
        if self._names is None and names:
            self._names = tuple(names)
        self._num_classes = self._num_classes or state_dict.get("num_classes")


def _thinned(layout: Layout, dataset: Any, limit: int) -> Layout:
    """Return a layout with at most `limit` of the rows of a source, evenly spaced."""
    rows = np.arange(len(dataset)) if layout.rows is None else layout.rows
    count = min(limit, len(rows))
    return dataclasses.replace(layout, rows=rows[len(rows) * np.arange(count) // max(count, 1)])
