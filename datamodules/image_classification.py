"""The datamodules over labelled images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from .core.base import ImageDataModule, Split, splits_of
from .core.decode import MAX_PIXELS, Account
from .core.labels import LabelCollate, LabelledEvaluationSet, LabelledRows, LabelReader, LabelTable
from .core.loaders import BatchLoader
from .image_text import Sources, by_split
from .sources.open import Opening
from .sources.table import Layout
from .transforms.classification import (
    CIFAREvalTransform,
    CIFARTrainTransform,
    ImageNetEvalTransform,
    ImageNetTrainTransform,
)
from .transforms.clip import pair_eval_transform

Preset = Literal["cifar", "imagenet"]


class LabelDataModule(ImageDataModule):
    """Labelled images, in batches of the project's contract (dicts of tensors).

    Order and draws are those of :class:`ImageDataModule`. A training batch holds ``label`` [B], ``sample_index`` [B]
    and float [B, 3, H, W] for each view, augmented independently; an evaluation batch one view, ``image``, without
    augmentation. A subclass says what the rows are, in :meth:`open_split`, and supplies :attr:`num_classes`.

    Args:
        batch_size: training images per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process, 0 to load in the process itself.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: copy batches to page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and augmentation; by default Lightning's global seed, or 0 without one. The value in
            a checkpoint wins when a run is resumed.
        preset: name of the preset whose transforms are the default; None: as the module's checkpoint was evaluated,
            else "cifar".
        image_size: side of the square images, pixels; by default the module's or the checkpoint's, else the preset's.
        train_transform: transform that takes the place of the preset's in training.
        eval_transform: transform that takes the place of the preset's in evaluation.
        augment: False uses the evaluation transform in training too.
        views: names of the augmented views of a training image; by default those of the module's attribute
            ``views``, or "image" alone. An empty list reads no training images at all.
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        persistent_workers: bool,
        pin_memory: bool | None,
        seed: int | None,
        preset: Preset | None,
        image_size: int | None,
        train_transform: nn.Module | None,
        eval_transform: nn.Module | None,
        augment: bool,
        views: list[str] | None,
        max_bad_share: float,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=train_transform if augment else eval_transform,
            eval_transform=eval_transform,
            max_bad_share=max_bad_share,
        )
        self._views = views
        self._preset, self._side, self._augment = preset, image_size, augment

    def default_train_transform(self) -> nn.Module:
        """The preset's, normalised as the module's checkpoint was."""
        if not self._augment:
            return self.default_eval_transform()
        kind, size = self._look()
        training = {"cifar": CIFARTrainTransform, "imagenet": ImageNetTrainTransform}[kind]
        expected = self.expected_preprocessing() if self._preset is None else {}
        return training(size, **{name: expected[name] for name in ("mean", "std") if name in expected})

    def default_eval_transform(self) -> nn.Module:
        """What the module's checkpoint was evaluated with, where no preset was given; else the preset's."""
        expected, (kind, size) = self.expected_preprocessing(), self._look()
        if self._preset is None and "mean" in expected:
            return pair_eval_transform(size, expected)
        return {"cifar": CIFAREvalTransform, "imagenet": ImageNetEvalTransform}[kind](size)

    def _look(self) -> tuple[Preset, int]:
        """Whose transforms these are, and the side of the images."""
        expected = self.expected_preprocessing() if self._preset is None else {}
        cut = expected.get("resize_mode") == "shortest"
        kind = self._preset or ("imagenet" if cut else "cifar")
        return kind, self._side or expected.get("image_size") or {"cifar": 32, "imagenet": 224}[kind]

    @property
    def views(self) -> list[str]:
        """Names of the augmented views of a training image."""
        if self._views is not None:
            return self._views
        module = self.trainer.lightning_module if self.trainer is not None else None
        return list(getattr(module, "views", ["image"]))

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        raise NotImplementedError

    def every_image(self, split: Split) -> BatchLoader:
        """Each image of a split once over all processes, as evaluation reads it; unusable ones are left out.

        For what is computed of all training images before training, such as features.

        Args:
            split: one that is set up.

        Raises:
            ValueError: it is not set up.
        """
        loader: BatchLoader = self._evaluation_loader(split)
        loader.account = Account(split, self.max_bad_share, "left out")  # training has an account of its own
        return loader

    def training_reader(self, rows: LabelledRows) -> LabelReader:
        """Reads a row as augmented views with a label."""
        return LabelReader(rows, self.train_transform, len(self.views))

    def training_collate(self) -> LabelCollate:
        """Stacks the views."""
        return LabelCollate(self.views)

    def evaluation_set(self, rows: LabelledRows, items: Sequence[int], split: Split) -> LabelledEvaluationSet:
        """Images with labels."""
        return LabelledEvaluationSet(rows, self.eval_transform, self.run_seed)

    def evaluation_collate(self) -> LabelCollate:
        """Stacks the images."""
        return LabelCollate(["image"], self.eval_transform)


class ImageClassificationDataModule(LabelDataModule):
    """Labelled images from Parquet, JSON or CSV lists, folders with a folder for each class, tars, or the hub.

    Labels are whole numbers from 0, or names; names are numbered in the order that the source lists them in, else
    sorted. A number in text counts as a number.

    Args:
        train: training rows: a file, glob pattern, folder or hub name, a :class:`Source`, or a list of these. Files:
            ``.parquet``, ``.json``, ``.jsonl``, ``.csv``, ``.tar`` in WebDataset's form (the label in the member that
            ``label_column`` names, such as ``cls``). Folders: of such files, of images in a folder for each class,
            or saved by ``datasets``.
        validation: rows for validation, in the same forms. Hub data sets without such a split: a :class:`Source` with
            ``split: test``.
        test: rows for testing, in the same forms.
        predict: rows for prediction; labels may be missing, and folders of images need no folders for classes.
        image_root: folder that relative image paths start from; by default that of the file which names them.
        image_column: column of the images (CIFAR on the hub: ``img``).
        label_column: column of the labels (CIFAR-100 on the hub: ``fine_label``).
        num_classes: how many classes there are; by default as many as the source names, else the largest training label
            plus one.
        class_names: names of the classes 0, 1, ...; by default those of the training rows.
        batch_size: training images per process and batch (CRD and CoCoRD on CIFAR: 64).
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and augmentation; by default Lightning's global seed, or 0 without one. The value in
            a checkpoint wins when a run is resumed.
        preset: name of the preset whose transforms are the default: "cifar" pads by 4, crops and mirrors; "imagenet"
            crops at random and mirrors, and evaluates the middle. None: as the module's checkpoint was evaluated, else
            "cifar".
        image_size: side of the square images, pixels; by default, without a preset, the module's or its checkpoint's,
            else 32 for "cifar" and 224 for "imagenet".
        train_transform: transform that takes the place of the preset's in training.
        eval_transform: transform that takes the place of the preset's in evaluation.
        augment: False uses the evaluation transform in training too.
        views: names of the augmented views of a training image; by default those of the module's attribute
            ``views``, or "image" alone. An empty list reads no training images at all.
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
        max_pixels: images with more are refused before they are decoded.
        limit_train_rows: train on this many of the rows only, spread evenly over the source; for trials.
        cache_dir: where the ``datasets`` library keeps its memory-mapped copies.
    """

    def __init__(
        self,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        image_root: str | None = None,
        image_column: str = "image",
        label_column: str = "label",
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        preset: Preset | None = None,
        image_size: int | None = None,
        train_transform: nn.Module | None = None,
        eval_transform: nn.Module | None = None,
        augment: bool = True,
        views: list[str] | None = None,
        max_bad_share: float = 0.05,
        max_pixels: int = MAX_PIXELS,
        limit_train_rows: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            preset=preset,
            image_size=image_size,
            train_transform=train_transform,
            eval_transform=eval_transform,
            augment=augment,
            views=views,
            max_bad_share=max_bad_share,
        )
        self.max_pixels = max_pixels
        self.limit_train_rows = limit_train_rows
        self.sources = by_split(train, validation, test, predict)
        self.opening = Opening(image_root, image_column, label_column, None, cache_dir, labels=True)
        self._num_classes = num_classes
        self._names = tuple(class_names) if class_names is not None else None
        self._record_hyperparameters()

    def prepare_data(self) -> None:
        """Convert the files once per node, so that the other processes find the memory-mapped copies."""
        for split in splits_of(self.trainer.state.fn if self.trainer is not None else None):
            self._open(split)

    def open_split(self, split: Split) -> LabelTable | None:
        """The rows of a split, checked."""
        parts = self._open(split)
        if not parts:
            return None
        rows = LabelTable(parts, self.max_pixels)
        rows.check(split)
        return rows

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and check that the labels of training are those of validation."""
        super().setup(stage)
        if "train" in self._rows:
            for split in self._rows:
                self._number(split)

    def _evaluation_loader(self, split: Split) -> Any:
        # Not in `setup`: a checkpoint, which names the classes of its training, is restored after it.
        self._number(split)
        return super()._evaluation_loader(split)

    def _number(self, split: Split) -> None:
        rows = self._opened(split)
        if rows.given and split != "predict":  # prediction needs no labels, and does not mind what is in their place
            rows.number(self.class_names, self.num_classes, split)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes by number; None where the data has numbers only."""
        if self._names is None and (rows := self._label_rows()) is not None:
            self._names = rows.class_names()
        return self._names

    @property
    def num_classes(self) -> int:
        """How many classes there are.

        Raises:
            ValueError: nobody said, and there are no labels to tell from; or there are more or fewer names.
        """
        names = self.class_names
        if self._num_classes is None:
            rows = self._label_rows()
            numbers = [label for label in rows.given if isinstance(label, int)] if rows is not None else []
            if not numbers and not names:
                raise ValueError("found no labels to count the classes by, expected some: set data.num_classes")
            self._num_classes = len(names) if names else max(numbers) + 1
        if names and len(names) > self._num_classes:
            raise ValueError(
                f"found {len(names)} classes by name, such as {names[-1]!r}, expected at most "
                f"num_classes={self._num_classes}: set data.num_classes to {len(names)}"
            )
        # Evaluation may show some of the classes only, and so may a share of the rows.
        if names and len(names) < self._num_classes and "train" in self._rows and self.limit_train_rows is None:
            raise ValueError(
                f"found {len(names)} classes in the training data, from {names[0]!r} to {names[-1]!r}, expected "
                f"num_classes={self._num_classes}: set data.num_classes to {len(names)}"
            )
        return self._num_classes

    def _label_rows(self) -> LabelTable | None:
        """The rows that say which classes there are: those of training, else any with labels."""
        if "train" not in self._rows and self.sources["train"] and (rows := self.open_split("train")) is not None:
            self._rows["train"] = rows
        ordered = sorted(self._rows, key=lambda split: split != "train")
        return next((self._rows[split] for split in ordered if self._rows[split].given), None)

    def state_dict(self) -> dict[str, Any]:
        """The run's seed, what the batch counter counts, and the classes of training."""
        known = self._num_classes is not None or bool(self._rows)
        names = self.class_names if known else None
        return super().state_dict() | {
            "class_names": list(names) if names else None,
            "num_classes": self.num_classes if known else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's seed and, where none are given, its classes."""
        super().load_state_dict(state_dict)
        names = state_dict.get("class_names")
        if self._names is None and names:
            self._names = tuple(names)
        self._num_classes = self._num_classes or state_dict.get("num_classes")

    def _open(self, split: Split) -> list[tuple[Any, Layout]]:
        opening = dataclasses.replace(self.opening, need_captions=split != "predict")
        parts = [opening.open(source, split) for source in self.sources[split]]
        if split == "train" and self.limit_train_rows is not None:
            parts = [(_thinned(dataset, self.limit_train_rows), layout) for dataset, layout in parts]
        return parts


def _thinned(dataset: Any, rows: int) -> Any:
    """At most so many rows, spread evenly."""
    return dataset if rows >= len(dataset) else dataset.select([len(dataset) * row // rows for row in range(rows)])
